"""``crucible inspect``: what a checkpoint is, what it costs in memory, and whether that fits this machine.

Counts come from the tensors that the config names; sizes are of what is loaded for serving (int8 weights keep a
16-bit scale an output and 32 inputs, norms and biases stay float32) and of a float32 KV cache.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from crucible.checkpoint import Checkpoint, check_finite, expected_tensors, matrices, open_checkpoint
from crucible.config.engine import EngineConfig
from crucible.config.limits import CPU_CONTEXT
from crucible.config.model import Learned, ModelConfig, Rope
from crucible.kernels.constants import QUANT_GROUP
from crucible.model.kv import kv_bytes_per_token

_PARTS = {"embed_tokens": "embedding", "embed_positions": "embedding", "self_attn": "attention", "mlp": "mlp",
          "norm": "norms", "lm_head": "output head"}  # fmt: skip
"""What a tensor's name contains, and the part it belongs to, in the order of the table."""


@dataclass(frozen=True)
class Component:
    """Parameters of one part of the model, and its bytes as float32 and as int8."""

    parameters: int
    f32: int
    int8: int


@dataclass(frozen=True)
class ModelReport:
    """Everything ``crucible inspect`` prints.

    Sizes in bytes; ``available`` is ``None`` where it cannot be known. ``dtype`` names every type that weights are
    stored in.
    """

    path: Path
    native: bool
    config: ModelConfig
    dtype: str
    file_bytes: int
    components: dict[str, Component]
    parameters: int
    embedding_parameters: int
    kv_bytes_per_token: int
    serving_context: int
    serving_requests: int
    available: int | None

    @property
    def non_embedding_parameters(self) -> int:
        return self.parameters - self.embedding_parameters

    def needed(self, quant: str) -> int:
        """Weights plus the KV pool of crucible-serve's defaults."""
        weights = _sum(self.components)
        packed = weights.int8 if quant == "int8" else weights.f32
        return packed + self.serving_requests * self.serving_context * self.kv_bytes_per_token


def inspect_model(path: str | Path) -> ModelReport:
    """Validates the checkpoint at ``path``, weights included (one pass over them). Raises CheckpointError."""
    directory = Path(path)
    with open_checkpoint(directory) as checkpoint:
        check_finite(checkpoint)
        return _report(checkpoint)


def describe(path: str | Path) -> str:
    """inspect_model as text for a terminal. Raises CheckpointError."""
    return render(inspect_model(path))


def _report(checkpoint: Checkpoint) -> ModelReport:
    config = checkpoint.config
    components = components_of(config)
    return ModelReport(
        path=checkpoint.path,
        native=checkpoint.native,
        config=config,
        dtype=" and ".join(sorted(set(checkpoint.dtypes().values()))),
        file_bytes=checkpoint.file_bytes,
        components=components,
        parameters=sum(part.parameters for part in components.values()),
        embedding_parameters=components["embedding"].parameters + components["output head"].parameters,
        kv_bytes_per_token=kv_bytes_per_token(config),
        serving_context=min(config.context_length, CPU_CONTEXT),
        serving_requests=EngineConfig().max_batch,
        available=available_memory(),
    )


def components_of(config: ModelConfig) -> dict[str, Component]:
    """Parameters and bytes by part: embedding, attention, mlp, norms, output head (0 when tied)."""
    parts = dict.fromkeys(_PARTS.values(), Component(0, 0, 0))
    quantizable = matrices(config)
    for name, shape in expected_tensors(config).items():
        part = next(label for key, label in _PARTS.items() if key in name)
        count = math.prod(shape)
        packed = name in quantizable
        old = parts[part]
        parts[part] = Component(
            parameters=old.parameters + count,
            f32=old.f32 + 4 * count,
            int8=old.int8 + (count + 2 * shape[0] * -(-shape[1] // QUANT_GROUP) if packed else 4 * count),
        )
    return parts


def available_memory() -> int | None:
    """Bytes that can still be used here: of the machine, and within this control group's limit if there is one."""
    known = [size for size in (_machine_memory(), _cgroup_memory()) if size is not None]
    return min(known) if known else None


def _machine_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not a name here: macOS
        return None


def _cgroup_memory() -> int | None:
    """What a container's limit leaves (version 2, then 1). File pages count as used there, but can be dropped."""
    for folder, limit, used in (("", "memory.max", "memory.current"),
                                ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")):  # fmt: skip
        group = Path("/sys/fs/cgroup", folder)
        try:
            left = int((group / limit).read_text()) - int((group / used).read_text())
            for line in (group / "memory.stat").read_text().splitlines():
                if line.startswith(("active_file ", "inactive_file ")):
                    left += int(line.split()[1])
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return max(left, 0)
    return None


def render(report: ModelReport) -> str:
    """The report as lines of text."""
    config, total = report.config, report.parameters
    kind = "native" if report.native else "Hugging Face Llama"
    share = report.embedding_parameters / total
    lines = [
        f"{report.path}  ({kind} checkpoint)",
        f"architecture  {config.num_layers} layers, hidden {config.hidden_size}, MLP {config.intermediate_size} "
        f"{config.activation}, {config.num_heads} heads / {config.num_kv_heads} KV heads of {config.head_dim}",
        f"              {_norm_text(config)}, {_position_text(config)}, {_bias_text(config)}, "
        f"{'tied' if config.tied_embeddings else 'untied'} embeddings",
        f"vocabulary    {config.vocab_size} rows, {config.token_count} tokens; bos {config.bos_token_id}, "
        f"eos {', '.join(map(str, config.eos_token_ids)) or 'none'}",
        f"context       {config.context_length} tokens",
        f"parameters    {total:,} total, {report.non_embedding_parameters:,} non-embedding "
        f"({share:.1%} are embeddings)",
        f"stored        {report.dtype}, {size_text(report.file_bytes)}",
        "",
        f"{'memory':<14}{'parameters':>14}{'f32':>12}{'int8':>12}",
    ]
    rows = [item for item in report.components.items() if item[1].parameters]
    rows.append(("weights", _sum(report.components)))
    lines += [
        f"{name:<14}{part.parameters:>14,}{size_text(part.f32):>12}{size_text(part.int8):>12}" for name, part in rows
    ]
    per_token = report.kv_bytes_per_token
    lines += [
        "",
        f"KV cache      {per_token:,} bytes a token (f32); {size_text(per_token * config.context_length)} for the full "
        f"context of {config.context_length}",
        f"              {size_text(per_token * report.serving_context * report.serving_requests)} for "
        f"{report.serving_requests} requests of {report.serving_context} tokens, the default when serving on a CPU",
        f"fits here     {_fit_text(report)}",
    ]
    return "\n".join(lines)


def _fit_text(report: ModelReport) -> str:
    needs = {quant: report.needed(quant) for quant in ("int8", "f32")}
    text = ", ".join(f"{quant} {size_text(size)}" for quant, size in needs.items())
    if report.available is None:
        return f"unknown: serving needs {text}; available memory cannot be read here"
    fitting = [quant for quant, size in needs.items() if size <= report.available]
    verdict = "yes" if len(fitting) == 2 else f"only as {fitting[0]}" if fitting else "no"
    return f"{verdict}: serving needs {text} of {size_text(report.available)} available"


def _sum(components: dict[str, Component]) -> Component:
    parts = components.values()
    return Component(sum(p.parameters for p in parts), sum(p.f32 for p in parts), sum(p.int8 for p in parts))


def _norm_text(config: ModelConfig) -> str:
    return f"{config.norm.placement}-{config.norm.type} (eps {config.norm.eps:g})"


def _position_text(config: ModelConfig) -> str:
    position = config.position
    if isinstance(position, Rope):
        scaling = position.scaling
        scaled = f", {scaling.__struct_config__.tag} scaling x{scaling.factor:g}" if scaling else ""
        return f"RoPE base {position.theta:g} ({position.pairing}{scaled})"
    return "learned positions" if isinstance(position, Learned) else f"positions: {position.__struct_config__.tag}"


def _bias_text(config: ModelConfig) -> str:
    names = {"qkv": "QKV", "attention_output": "attention output", "mlp": "MLP"}
    present = [text for name, text in names.items() if getattr(config.biases, name)]
    return f"biases: {', '.join(present)}" if present else "no biases"


def size_text(size: int) -> str:
    """``1.5 MiB`` and the like."""
    if size < 1024:
        return f"{size} B"
    power = min(int(math.log2(size)) // 10, 4)
    return f"{size / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
