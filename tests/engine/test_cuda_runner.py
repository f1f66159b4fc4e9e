"""The GPU engine with its kernels in the host emulator: against the oracle, and a request's bits in any company."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crucible.checkpoint import Checkpoint, open_checkpoint
from crucible.config import EngineConfig, SamplingParams
from crucible.config.model import Alibi, Biases, Learned, NoPosition, Norm, Rope
from crucible.engine.core import EngineCore
from crucible.engine.cuda_runner import CudaRunner
from crucible.engine.scheduler import Plan
from crucible.errors import EngineError
from crucible.model.cuda_ops import CudaOps
from crucible.model.reference_ops import ReferenceOps
from crucible.model.weights import load_weights
from tests.checkpoints import make_checkpoint
from tests.direct_model import Model
from tests.kernels.cuda.emulated_device import EmulatedDevice

CONTEXT, PAGES = 192, 40
OF_OPS = ("gemm", "decode_gemm", "attn", "prefill_attn")


def model(directory: Path, **changes: Any) -> Path:
    sizes = {"head_dim": 64, "num_heads": 3, "num_kv_heads": 1, "hidden_size": 96, "intermediate_size": 112}
    vocabulary = {"vocab_size": 112, "token_count": 107, "eos_token_ids": []}
    return make_checkpoint(directory / "model", **{**sizes, **vocabulary, **changes})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("cuda"))


class Engine:
    """max_batch 4, prompts 64 tokens a step; ``rows``: the logits that each request's tokens were chosen from.

    Options are EmulatedDevice's, CudaOps', CudaRunner's and ``async_steps``.
    """

    def __init__(self, path: Path, quant: str = "int8", max_batch: int = 4, **options: Any) -> None:
        of_device = {name: options.pop(name) for name in ("order", "lazy", "refuse") if name in options}
        self.device = EmulatedDevice(**of_device)
        with open_checkpoint(path) as checkpoint:
            self._build(checkpoint, quant, max_batch, options)

    def _build(self, checkpoint: Checkpoint, quant: str, max_batch: int, options: dict[str, Any]) -> None:
        config = checkpoint.config
        of_ops = {name: options.pop(name) for name in OF_OPS if name in options}
        async_steps = options.pop("async_steps", True)
        ops: Any = CudaOps(
            config, self.device, quant=quant, max_rows=80, max_sequences=max_batch, context=CONTEXT, **of_ops
        )
        weights = load_weights(checkpoint, ops, quant)
        cache = ops.allocate_cache(PAGES)
        if quant != "f32":
            cache.k[...], cache.v[...] = np.nan, np.nan  # what was not written must not be read
        self.runner = CudaRunner(
            weights, ops, cache, device=self.device, max_rows=80, max_sequences=max_batch, context=CONTEXT,
            token_count=config.token_count, **options,
        )  # fmt: skip
        self.config = EngineConfig(
            device="cuda",
            quant=quant,
            max_batch=max_batch,
            context=CONTEXT,
            kv_pages=PAGES,
            prefill_budget=64,
            threads=1,
            async_steps=async_steps,
        )
        self.core = EngineCore(self.config, config, self.runner)
        self.rows: dict[str, list[np.ndarray[Any, Any]]] = {}
        self.runner.on_logits = self._keep
        self.ahead = self.surplus = 0
        collect = self.runner.collect

        def counted() -> Any:
            plan = self.runner._flights[0].plan
            self.ahead += plan.ahead
            self.surplus += plan.surviving() is not None
            return collect()

        self.runner.collect = counted  # type: ignore[method-assign]

    def _keep(self, requests: list[Any], logits: np.ndarray[Any, Any]) -> None:
        for request, row in zip(requests, logits, strict=True):
            self.rows.setdefault(request.request_id, []).append(row.copy())

    def run(self, jobs: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {name: [] for name in jobs}
        for name, (prompt, params) in jobs.items():
            self.core.add_request(name, prompt, params)
        while self.core.has_work():
            for event in self.core.step().tokens:
                tokens[event.request_id].append(event.token_id)
        assert self.core.failure is None
        self.core.check()
        return tokens


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 107, length).tolist()


AXES = {
    "llama": {},
    "interleaved": {"position": Rope(theta=500.0, pairing="interleaved", scaling=None)},
    "alibi": {"position": Alibi()},
    "learned": {"position": Learned()},
    "none, untied": {"position": NoPosition(), "tied_embeddings": False},
    "layernorm": {"norm": Norm(type="layernorm", placement="pre", eps=1e-5, bias=True)},
    "post": {"norm": Norm(type="rmsnorm", placement="post", eps=1e-5, bias=False)},
    "gelu, biases": {"activation": "gelu", "biases": Biases(qkv=True, attention_output=True, mlp=True)},
    "head_dim 128": {"head_dim": 128, "num_heads": 2, "num_kv_heads": 2},
}


@pytest.mark.parametrize("quant", ["int8", "f16", "f32"])
@pytest.mark.parametrize("axis", AXES)
def test_logits_are_the_oracles(axis: str, quant: str, tmp_path: Path) -> None:
    path = model(tmp_path, **AXES[axis])
    engine = Engine(path, quant)
    tokens = prompt(37, 1)
    out = engine.run({"a": (tokens, SamplingParams(max_tokens=3))})["a"]
    reference = Model(path, ReferenceOps, quant="int8" if quant == "int8" else "f32")
    bound = 2e-5 if quant == "f32" else 4e-3  # float32 sums; halves as inputs of every projection
    for step, row in enumerate(engine.rows["a"]):
        exact = reference.run((tokens + out[:step], 0, [0, 1, 2]))[0]
        assert np.abs(row - exact).max() <= bound * np.abs(exact).max()


def test_a_request_has_the_same_bits_alone_and_together(llama: Path) -> None:
    jobs = {
        "greedy": (prompt(70, 2), SamplingParams(max_tokens=6)),
        "drawn": (prompt(5, 3), SamplingParams(max_tokens=8, temperature=0.9, top_k=7, seed=5)),
        "wide": (prompt(131, 4), SamplingParams(max_tokens=4, temperature=1.5, top_k=107, seed=6)),
        "short": (prompt(1, 5), SamplingParams(max_tokens=9)),
        "late": (prompt(18, 6), SamplingParams(max_tokens=5)),
    }
    together = Engine(llama)
    tokens = together.run(jobs)
    for name, job in jobs.items():
        alone = Engine(llama, order="shuffled")
        assert alone.run({name: job})[name] == tokens[name]
        assert np.array_equal(np.array(alone.rows[name]), np.array(together.rows[name]))


def same_rows(one: Engine, other: Engine) -> bool:
    return one.rows.keys() == other.rows.keys() and all(
        np.array_equal(np.array(rows), np.array(other.rows[name])) for name, rows in one.rows.items()
    )


MIXED = {
    "greedy": (prompt(20, 2), SamplingParams(max_tokens=7)),
    "drawn": (prompt(9, 3), SamplingParams(max_tokens=4, temperature=0.9, top_k=7, seed=5)),
    "long": (prompt(70, 4), SamplingParams(max_tokens=3)),
}


@pytest.mark.parametrize("quant", ["int8", "f32"])
def test_graphs_compute_what_eager_steps_do(quant: str, llama: Path) -> None:
    eager = Engine(llama, quant, graphs=False, prefill_graphs=False)
    graphs = Engine(llama, quant)
    graphs.runner.warm_up()
    graphs.rows.clear()
    assert graphs.device.captures == 4  # one for each number of decode rows
    for turn in range(3):  # prompt shapes are run eagerly, then captured, then only replayed
        jobs = {f"{name}{turn}": (ids[turn:] + ids[:turn], params) for name, (ids, params) in MIXED.items()}
        graphs.device.replays, before = 0, graphs.device.captures
        assert eager.run(jobs) == graphs.run(jobs)
        assert (graphs.device.captures > before) == (turn == 1)
    assert eager.device.captures == eager.device.replays == 0
    assert graphs.device.launches.count("crucible_argmax") > 0
    assert same_rows(eager, graphs)


def test_a_graph_is_replayed_for_its_shape_only(llama: Path) -> None:
    """64 rows each: of one prompt, of one that goes on, of two prompts that are cut differently, of three."""
    eager, graphs = Engine(llama, prefill_graphs=False, graphs=False), Engine(llama, graphs=False)
    for turn in range(3):
        for index, lengths in enumerate([(64,), (70,), (32, 32), (20, 44), (20, 20, 24)]):
            seed = 100 * turn + 10 * index
            jobs = {
                f"{seed + i}": (prompt(length, seed + i), SamplingParams(max_tokens=1))
                for i, length in enumerate(lengths)
            }
            assert eager.run(jobs) == graphs.run(jobs)
    assert graphs.device.captures == 5  # one for both of two prompts, and one for the 6 rows that remained of 70
    assert same_rows(eager, graphs)


def test_prefill_graphs_can_be_switched_off(llama: Path) -> None:
    engine = Engine(llama, prefill_graphs=False)
    for name in "abc":
        engine.run({name: (prompt(5, 1), SamplingParams(max_tokens=1))})
    assert engine.device.captures == engine.device.replays == 0


def test_what_cannot_be_captured_runs_eagerly_and_is_not_tried_again(llama: Path) -> None:
    engine, plain = Engine(llama, refuse=True), Engine(llama)
    for turn in range(4):
        job = {f"a{turn}": (prompt(5, turn), SamplingParams(max_tokens=3))}
        assert engine.run(job) == plain.run(job)
    assert engine.device.captures == 2  # of the decode step and of the prompt
    assert engine.device.replays == 0
    assert same_rows(engine, plain)


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_queued_ahead_have_the_bits_of_steps_that_wait(graphs: bool, tmp_path: Path) -> None:
    path = model(tmp_path, tied_embeddings=False, eos_token_ids=list(range(0, 107, 9)))  # answers vary, and end
    options = {"graphs": graphs, "prefill_graphs": graphs}
    ahead, plain = Engine(path, lazy=True, **options), Engine(path, async_steps=False, **options)
    jobs = {f"r{i}": (prompt(3 + 5 * i, i), SamplingParams(max_tokens=20, ignore_eos=i == 2)) for i in range(6)}
    jobs["drawn"] = (prompt(9, 3), SamplingParams(max_tokens=4, temperature=0.9, top_k=7, seed=5))
    assert ahead.run(jobs) == plain.run(jobs)
    assert same_rows(ahead, plain)
    assert ahead.ahead > 3
    assert ahead.surplus > 0
    assert plain.ahead == 0


def test_the_tokens_of_a_step_in_flight_need_not_come_to_the_host(llama: Path) -> None:
    """A step is queued before the one before it has begun: its ids cannot have come from the host."""
    engine = Engine(llama, lazy=True)
    engine.core.add_request("a", prompt(5, 1), SamplingParams(max_tokens=8))
    engine.core.step()
    done = len(engine.device.launches)
    begun: list[int] = []
    launch = engine.runner.launch

    def noted(plan: Plan) -> None:
        launch(plan)
        begun.append(len(engine.device.launches))

    engine.runner.launch = noted  # type: ignore[method-assign]
    engine.core.step()
    assert begun == [done, done]
    assert len(engine.runner._flights) == 1
    assert engine.device.launches[done:].count("crucible_argmax") == 1
    while engine.core.has_work():
        engine.core.step()


@pytest.mark.parametrize("where", ["to_device", "mark", "wait"])
@pytest.mark.parametrize("call", [4, 5])
def test_an_interrupt_loses_no_token(call: int, where: str, tmp_path: Path) -> None:
    path = model(tmp_path, tied_embeddings=False)  # its answers vary
    engine, plain = Engine(path, lazy=True), Engine(path, async_steps=False)
    job = prompt(15, 1), SamplingParams(max_tokens=8)
    original, calls = getattr(engine.device, where), 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return original(*arguments)

    setattr(engine.device, where, interrupted)
    engine.core.add_request("a", *job)
    tokens: list[int] = []
    while engine.core.has_work():
        with contextlib.suppress(KeyboardInterrupt):
            tokens += [event.token_id for event in engine.core.step().tokens]
    assert calls > call
    assert tokens == plain.run({"a": job})["a"]
    assert len(set(tokens)) > 4


def test_a_plan_ahead_of_nothing_is_refused(llama: Path) -> None:
    engine = Engine(llama)
    engine.core.add_request("a", prompt(5, 1), SamplingParams(max_tokens=8))
    engine.core.step()
    plan = Plan(engine.core.scheduler.running, ahead=True)
    with pytest.raises(EngineError, match="must follow one plan in flight"):
        engine.runner.launch(plan)


@pytest.mark.parametrize("options", [
    {"gemm": "big"}, {"gemm": "small"}, {"decode_gemm": "big"}, {"attn": "single"}, {"gemm": "big", "attn": "single"},
])  # fmt: skip
def test_a_switch_with_equal_bits(options: dict[str, str], llama: Path) -> None:
    one, other = Engine(llama), Engine(llama, **options)
    assert one.run(MIXED) == other.run(MIXED)
    assert same_rows(one, other)
    families = {name.split("_")[2].rstrip("0123456789") for name in other.device.launches if "linear" in name}
    assert families == {options.get("gemm", "small"), options.get("decode_gemm", options.get("gemm", "small"))}


def test_decode_attention_is_split_unless_told_otherwise(llama: Path) -> None:
    split, single = Engine(llama), Engine(llama, attn="single")
    assert split.runner.ops.decode_splits(1) > 1
    assert single.runner.ops.decode_splits(1) == 1


def test_the_reference_attention_of_prompts(llama: Path) -> None:
    fast, slow = Engine(llama), Engine(llama, prefill_attn="reference")
    jobs = {**MIXED, "late": (prompt(100, 8), SamplingParams(max_tokens=2))}  # prompts beside decode rows
    fast.run(jobs)
    tokens = slow.run(jobs)
    assert not any("attention_prefill" in name for name in slow.device.launches)
    assert not any("attention_reference" in name for name in fast.device.launches)
    for name, rows in slow.rows.items():
        assert np.abs(rows[0] - fast.rows[name][0]).max() <= 4e-3 * np.abs(rows[0]).max()
    alone = Engine(llama, prefill_attn="reference")
    assert alone.run({"late": jobs["late"]})["late"] == tokens["late"]
    assert np.array_equal(np.array(alone.rows["late"]), np.array(slow.rows["late"]))


@pytest.mark.parametrize("switch", ["gemm", "device_argmax", "device_top_k"])
def test_a_switch_leads_to_the_reference_path(switch: str, llama: Path) -> None:
    jobs = {
        "greedy": (prompt(20, 2), SamplingParams(max_tokens=4)),
        "drawn": (prompt(9, 3), SamplingParams(max_tokens=4, temperature=0.9, top_k=7, seed=5)),
    }
    fast, slow = Engine(llama), Engine(llama, **{switch: "scalar" if switch == "gemm" else False})
    assert fast.run(jobs) == slow.run(jobs)
    kernels = {"gemm": "linear_small", "device_argmax": "argmax", "device_top_k": "top_k"}
    assert any(kernels[switch] in name for name in fast.device.launches)
    assert not any(kernels[switch] in name for name in slow.device.launches)


def test_a_row_with_nan_fails_alone(llama: Path) -> None:
    engine = Engine(llama)
    original = engine.runner.ops.logits

    def poisoned(x: Any, head: Any, batch: Any) -> Any:
        logits = original(x, head, batch)
        logits[0, 5] = np.nan
        return logits

    engine.runner.ops.logits = poisoned
    jobs = {
        "first": (prompt(4, 1), SamplingParams(max_tokens=3)),
        "second": (prompt(4, 2), SamplingParams(max_tokens=3)),
    }
    for name, job in jobs.items():
        engine.core.add_request(name, *job)
    finished = {}
    while engine.core.has_work():
        finished |= {end.request_id: end for end in engine.core.step().finished}
    assert finished["first"].finish_reason == "error"
    assert finished["first"].error is not None
