"""FP8 products: rounding, layouts that tensor cores take, and gradients."""

from __future__ import annotations

import pytest
import torch

from crucible_train import fp8
from crucible_train.errors import TrainingError
from crucible_train.linear import Linear
from crucible_train.presets import model_config
from crucible_train.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_quantise_uses_the_whole_range(dtype: torch.dtype, size: float) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * size
    q, scale = fp8.quantise(x, dtype)
    assert scale.dtype == torch.float32
    assert q.float().abs().max() == torch.finfo(dtype).max
    step = 2.0 ** -(4 if dtype == fp8.E4M3 else 3)
    large = x.abs() > x.abs().max() / 100
    error = (q.float() * scale - x).abs() / x.abs()
    assert error[large].max() <= step


def test_zeros_stay_zeros() -> None:
    q, scale = fp8.quantise(torch.zeros(16, 16), fp8.E4M3)
    assert not q.float().any()
    assert scale > 0


@pytest.mark.parametrize("first", [fp8.E4M3, fp8.E5M2])
def test_the_simulation_is_what_scaled_mm_computes(first: torch.dtype) -> None:
    """torch's own operation runs on the CPU too; it takes the operands as scaled_matmul lays them out."""
    generator = torch.Generator().manual_seed(1)
    a, a_scale = fp8.quantise(torch.randn(32, 64, generator=generator), first)
    b, b_scale = fp8.quantise(torch.randn(48, 64, generator=generator), fp8.E4M3)
    want = torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.float32)
    assert torch.allclose(fp8.scaled_matmul(a, b.t(), a_scale, b_scale, torch.float32), want, rtol=1e-4, atol=1e-4)


def test_operands_have_the_layout_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def checked(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, **_: object) -> torch.Tensor:
        m, k = a.shape
        assert a.stride() == (k, 1)
        assert b.stride() == (1, k)
        assert b.shape[1] % 16 == 0
        assert k % 16 == 0
        assert scales[0].shape in ((m, 1), ())
        assert scales[1].shape == ()
        assert all(s.dtype == torch.float32 for s in scales[:2])
        assert b.dtype == fp8.E4M3
        seen.append(a.dtype)
        return torch.zeros(m, b.shape[1], dtype=torch.bfloat16)

    monkeypatch.setattr(fp8, "scaled_matmul", checked)
    model = Transformer(model_config("tiny"), matmul="fp8", head_matmul="fp8", chunk=16)
    tokens = torch.randint(512, (1, 40))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(tokens, tokens)
    loss.backward()
    assert seen.count(fp8.E5M2) == 2 * 4 + 2 * 3  # three chunks, the head's two gradients
    assert seen.count(fp8.E4M3) == 2 * 4 + 3


def test_linear_and_its_gradients() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 20, 64, generator=generator, requires_grad=True)
    weight = torch.randn(32, 64, generator=generator, requires_grad=True)
    y = fp8.linear(x, weight)
    want = torch.nn.functional.linear(x, weight)
    upstream = torch.randn(3, 20, 32, generator=generator)
    got = [y, *torch.autograd.grad(y, (x, weight), upstream)]
    exact = [want, *torch.autograd.grad(want, (x, weight), upstream)]
    for ours, plain, bound in zip(got, exact, (0.06, 0.1, 1e-6), strict=True):
        assert ours.shape == plain.shape
        assert (ours - plain).norm() <= bound * plain.norm()
        assert bound == 1e-6 or (ours - plain).norm() > 0.005 * plain.norm()  # it is FP8 that ran


def test_a_bias_is_added_after_the_product() -> None:
    layer = Linear(32, 16, bias=True, matmul="fp8")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 32)
    assert layer.bias is not None
    assert torch.equal(layer(x), fp8.linear(x, layer.weight) + layer.bias)


def test_a_model_learns_as_well_in_fp8() -> None:
    finals = {}
    for name, switches in {"bf16": {}, "fp8": {"matmul": "fp8", "head_matmul": "fp8"}}.items():
        torch.manual_seed(0)
        model = Transformer(model_config("tiny"), **switches)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        generator = torch.Generator().manual_seed(1)
        for _ in range(30):
            start = torch.randint(512, (8, 1), generator=generator)
            tokens = (start + 7 * torch.arange(33)) % 512
            with torch.autocast("cpu", torch.bfloat16):
                loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        finals[name] = loss.item()
    assert finals["bf16"] < 6
    assert finals["fp8"] == pytest.approx(finals["bf16"], abs=0.1)


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8.require(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    fp8.require(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(TrainingError, match="this one is sm_86; use matmul bf16"):
        fp8.require(torch.device("cuda", 0))


@pytest.mark.parametrize("precision", ["fp8", "fp8-two"])
def test_every_fp8_head_needs_its_multiples(precision: str) -> None:
    with pytest.raises(TrainingError, match="multiples of 16"):
        Transformer(model_config("tiny", vocab_size=513), head_matmul=precision)
