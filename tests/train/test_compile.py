"""torch.compile takes the whole training step into one graph, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from crucible_train import head as head_module
from crucible_train import softmax
from crucible_train.presets import Preset, model_config
from crucible_train.transformer import Transformer

SMALL = Preset(num_layers=1, hidden_size=32, num_heads=4, context_length=64, vocab_size=512)


pytestmark = pytest.mark.usefixtures("one_thread")


def losses_and_gradients(run: Any, model: Transformer, autocast: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    tokens, targets = torch.randint(512, (2, 3, 64), generator=generator)
    targets[0, :9] = -1
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = run(tokens, targets)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


# aot_eager traces forward and backward as inductor does, without minutes of C++ compilers.
@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"loss": "plain", "fused_projections": False, "residual": "float32"},
        {"matmul": "fp8", "head_matmul": "fp8"},
        {"position": "alibi", "gqa": "materialised"},
        {"position": "learned", "norm": "layernorm", "placement": "post", "activation": "gelu", "tied": False},
    ],
)
def test_one_graph_and_the_same_numbers(switches: dict[str, Any]) -> None:
    torch._dynamo.reset()
    axes = {
        name: switches[name] for name in ("position", "norm", "placement", "activation", "tied") if name in switches
    }
    compute = {name: value for name, value in switches.items() if name not in axes}
    torch.manual_seed(0)
    model = Transformer(model_config(SMALL, **axes), **compute)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for autocast in (False, True):
        want = losses_and_gradients(model, model, autocast)
        got = losses_and_gradients(compiled, model, autocast)
        assert len(got) == len(want) == 1 + len(list(model.parameters()))
        for ours, eager in zip(got, want, strict=True):
            # Sums in another order may round to another bf16 or FP8 number.
            bound = 0.1 if "matmul" in switches else 0.02 if autocast else 1e-6
            assert (ours - eager).norm() <= bound * eager.norm()


@pytest.mark.slow  # C++ compilers, up to a minute
def test_inductor_gives_the_same_loss() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Transformer(model_config(SMALL))
    want = losses_and_gradients(model, model, False)
    got = losses_and_gradients(torch.compile(model, fullgraph=True), model, False)
    for ours, eager in zip(got, want, strict=True):
        assert torch.allclose(ours, eager, rtol=1e-4, atol=1e-5 * eager.abs().max().item())


def test_the_pointwise_part_compiles_inside_the_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the operation, itself opaque to the step's graph, calls functions that are compiled."""
    torch._dynamo.reset()
    calls: list[str] = []

    def compiled(function: Callable[..., Any], _: bool) -> Callable[..., Any]:
        calls.append(function.__name__)
        return torch.compile(function, dynamic=False, backend="aot_eager")

    for head in ("bf16", "fp8-two", "fp8"):
        torch.manual_seed(0)
        model = Transformer(model_config(SMALL), head_matmul=head, chunk=150)
        want = losses_and_gradients(model, model, True)
        with monkeypatch.context() as patch:
            patch.setattr(softmax, "maybe_compiled", compiled)
            patch.setattr(head_module, "maybe_compiled", compiled)
            for rounded in (False, True):
                patch.setitem(softmax.FORMS, (False, rounded), softmax.FORMS[True, rounded])
            step = torch.compile(model, fullgraph=True, backend="aot_eager")
            for _ in range(2):
                got = losses_and_gradients(step, model, True)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                tokens, targets = torch.zeros(2, 1, 64, dtype=torch.long)
                assert step(tokens, targets).item() == pytest.approx(model.loss(tokens, targets).item(), rel=1e-3)
        for ours, eager in zip(got, want, strict=True):
            assert (ours - eager).norm() <= 0.05 * eager.norm()
    assert {"_evaluate", "_compiled", "_compiled_fp8", "_quantise_weight", "_quantise"} <= set(calls)
