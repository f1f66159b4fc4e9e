"""Checkpoints: a directory with ``config.json`` and safetensors, native (``crucible_format``) or Hugging Face Llama.

Which tensors a model has follows from its ModelConfig alone; the files must hold exactly those. A native file may hold
a matrix NAME as int8, with its scales in NAME_scale (docs/decisions/0005). Knows nothing of tokenizers and of what
computes with the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible.config.model import Learned, ModelConfig, parse_model_config, serialise_model_config
from crucible.directory import new_directory
from crucible.errors import CheckpointError
from crucible.importers.hf import INDEX_NAME, WEIGHTS_NAME, parse_hf_config, weight_files
from crucible.json_file import read_json, shown
from crucible.quantized import SCALE_SUFFIX, QuantizedTensor, scale_shape
from crucible.safetensors_file import FLOAT_NAMES, INTEGER_NAMES, SafetensorsFile, locate, write_safetensors

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
CONFIG_NAME = "config.json"
INT8 = "int8"
_POSITIONS = "model.embed_positions.weight"
_INV_FREQ = ".rotary_emb.inv_freq"
_CHUNK = 1 << 22  # elements looked at in one go


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model, in file order. Matrices are [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = (hidden,)
        if config.norm.bias:
            shapes[f"{name}.bias"] = (hidden,)

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    shapes[EMBEDDING] = (config.vocab_size, hidden)
    if isinstance(config.position, Learned):
        shapes[_POSITIONS] = (config.context_length, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        norm(prefix + "input_layernorm")
        for name, rows in (("q", queries), ("k", config.kv_dim), ("v", config.kv_dim)):
            linear(f"{prefix}self_attn.{name}_proj", rows, hidden, config.biases.qkv)
        linear(prefix + "self_attn.o_proj", hidden, queries, config.biases.attention_output)
        norm(prefix + "post_attention_layernorm")
        for name in ("gate", "up") if config.activation == "swiglu" else ("up",):
            linear(f"{prefix}mlp.{name}_proj", inner, hidden, config.biases.mlp)
        linear(prefix + "mlp.down_proj", hidden, inner, config.biases.mlp)
    norm("model.norm")
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def matrices(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that may be int8, with their shapes: embedding, projections, head. Learned positions may not."""
    return {name: s for name, s in expected_tensors(config).items() if len(s) == 2 and name != _POSITIONS}


class Checkpoint:
    """The weights of one model, read-only and memory-mapped. Made by open_checkpoint; a context manager."""

    path: Path
    config: ModelConfig
    dtype: str
    """The type that holds every tensor exactly: the one they are all stored in, else ``float32``."""
    native: bool
    """Whether this is the native format, not a Hugging Face directory."""

    def __init__(self, path: Path, config: ModelConfig, native: bool, holders: dict[str, SafetensorsFile]) -> None:
        self.path = path
        self.config = config
        self.native = native
        self._holders = holders
        self._shapes = expected_tensors(config)
        stored = set(self.dtypes().values())
        self.dtype = stored.pop() if len(stored) == 1 else "float32"

    @property
    def file_bytes(self) -> int:
        """Size of the weight files together."""
        return sum(file.size for file in dict.fromkeys(self._holders.values()))

    def names(self) -> list[str]:
        """Every tensor of the model (those of expected_tensors)."""
        return list(self._shapes)

    def dtypes(self) -> dict[str, str]:
        """What each tensor of names() is stored as: ``float32``, ``bfloat16``, ``float16`` or ``int8``."""
        names = FLOAT_NAMES | INTEGER_NAMES
        return {name: names[self._holders[name].entries[name].dtype] for name in self._shapes}

    def read(self, name: str) -> NDArray[np.float32]:
        """Tensor ``name``, float32, C-contiguous: a read-only view of the map if stored so, else a converted copy.

        int8 becomes the weights it stands for, exactly. Raises KeyError for a name that is not in names().
        """
        quantized = self.read_quantized(name)
        return self._holders[name].read(name) if quantized is None else quantized.dequantize()

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        """Tensor ``name`` as stored, read-only views of the map, where that is int8; else ``None``."""
        if self._holders[name].entries[name].dtype != "I8":
            return None
        scales = name + SCALE_SUFFIX
        return QuantizedTensor(self._holders[name].raw(name), self._holders[scales].aligned(scales))

    def raw(self, name: str) -> NDArray[Any]:
        """Tensor ``name`` as stored, a view of the map; bfloat16 as uint16 bit patterns, int8 without its scales."""
        return self._holders[name].raw(name)

    def file_of(self, name: str) -> Path:
        """The file that holds tensor ``name``."""
        return self._holders[name].path

    def release(self, name: str) -> None:
        """Gives the pages of tensor ``name`` back to the system; a later read maps them again."""
        self._holders[name].release(name)
        if name + SCALE_SUFFIX in self._holders:
            self._holders[name + SCALE_SUFFIX].release(name + SCALE_SUFFIX)

    def close(self) -> None:
        """Unmaps the files. Arrays that were read stay valid."""
        for file in dict.fromkeys(self._holders.values()):
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a native or Hugging Face Llama directory and checks names, shapes, dtypes and offsets.

    Of the weights only a head that a tied model stores once more is read, to compare it with the embedding; whether
    they are finite is check_finite's to say. Raises CheckpointError with one line that names the file and the fault.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such model directory")
    values = read_json(directory / CONFIG_NAME)
    native = "crucible_format" in values
    config = parse_model_config(values, directory / CONFIG_NAME) if native else parse_hf_config(values, directory)
    paths, shard_of = weight_files(directory)
    files: list[SafetensorsFile] = []
    try:
        files.extend(map(SafetensorsFile, paths))
        holders = locate(files, shard_of, directory / INDEX_NAME)
        _check_layout(config, native, holders, directory)
        _check_tied_head(holders, config)
    except BaseException:
        for file in files:
            file.close()
        raise
    return Checkpoint(directory, config, native, holders)


def _check_layout(config: ModelConfig, native: bool, holders: dict[str, SafetensorsFile], directory: Path) -> None:
    shapes = expected_tensors(config)
    scales = {name + SCALE_SUFFIX: name for name in matrices(config)} if native else {}
    missing = [name for name in shapes if name not in holders]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(f"{directory}: tensor {shown(missing[0])} is missing{more}")
    for name, file in holders.items():
        entry = file.entries[name]
        where = f"{file.path}: tensor {shown(name)}"
        if name in shapes:
            if entry.shape != shapes[name]:
                wanted = f"{CONFIG_NAME} asks for {list(shapes[name])}"
                raise CheckpointError(f"{where} has shape {shown(list(entry.shape))}, {wanted}")
            if entry.dtype == "I8" and name + SCALE_SUFFIX in scales:
                if name + SCALE_SUFFIX not in holders:
                    raise CheckpointError(f"{where} has dtype I8, but {shown(name + SCALE_SUFFIX)} is missing")
            elif entry.dtype not in FLOAT_NAMES:
                raise CheckpointError(f"{where} has dtype {entry.dtype}; use {', '.join(FLOAT_NAMES)}")
        elif name in scales:
            scaled = scales[name]
            if holders[scaled].entries[scaled].dtype != "I8":
                raise CheckpointError(f"{where} is unexpected; {shown(scaled)} is not I8 and has no scales")
            wanted = f"U16 {list(scale_shape(shapes[scaled]))}"
            if f"{entry.dtype} {list(entry.shape)}" != wanted:
                fault = f"is {entry.dtype} {shown(list(entry.shape))}"
                raise CheckpointError(f"{where} {fault}; the scales of {shown(scaled)} are {wanted}")
        elif not name.endswith(_INV_FREQ) and name != HEAD:
            raise CheckpointError(f"{where} is unexpected; {CONFIG_NAME} describes a model without it")


def _check_tied_head(holders: dict[str, SafetensorsFile], config: ModelConfig) -> None:
    """A tied model may store its head once more, but only the same one: else one of file and config is wrong."""
    if not config.tied_embeddings or HEAD not in holders:
        return
    head, embedding = holders[HEAD], holders[EMBEDDING]
    where = f"{head.path}: tensor {HEAD!r}"
    dtypes = {head.entries[HEAD].dtype, embedding.entries[EMBEDDING].dtype}
    if head.entries[HEAD].shape != embedding.entries[EMBEDDING].shape or not dtypes <= FLOAT_NAMES.keys():
        raise CheckpointError(f"{where} does not have the shape and a dtype of the embedding it is tied to")
    left, right = head.raw(HEAD), embedding.raw(EMBEDDING)
    if left.dtype != right.dtype:
        left, right = head.read(HEAD), embedding.read(EMBEDDING)
    step = max(1, _CHUNK // config.hidden_size)
    for row in range(0, config.vocab_size, step):
        if left[row : row + step].tobytes() != right[row : row + step].tobytes():
            raise CheckpointError(f"{where} differs from the embedding, though {CONFIG_NAME} ties them")
    head.release(HEAD)
    embedding.release(EMBEDDING)


def check_finite(checkpoint: Checkpoint) -> None:
    """One pass over every weight. Raises CheckpointError naming the first tensor and index that is NaN or infinite.

    Nor may int8 be -128, or anything but 0 where the scale is 0.
    """
    for name in checkpoint.names():
        quantized = checkpoint.read_quantized(name)
        if quantized is not None:
            fault = quantized.fault()
            if fault is not None:
                raise CheckpointError(f"{checkpoint.file_of(name)}: tensor {name!r} {fault}")
            checkpoint.release(name)
            continue
        raw = checkpoint.raw(name)
        flat = raw.reshape(-1)
        for first in range(0, flat.size, _CHUNK):
            part = flat[first : first + _CHUNK]
            finite = (part & 0x7F80) != 0x7F80 if part.dtype == np.uint16 else np.isfinite(part)
            if not finite.all():
                place = np.unravel_index(first + int(np.argmin(finite)), raw.shape)
                value = float(checkpoint.read(name)[place])
                index = [int(axis) for axis in place]
                raise CheckpointError(f"{checkpoint.file_of(name)}: tensor {name!r} holds {value} at index {index}")
        checkpoint.release(name)


def save_checkpoint(
    path: str | Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, NDArray[Any] | QuantizedTensor]],
    *,
    dtype: str | Mapping[str, str] = "float32",
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a native checkpoint directory, complete or not at all.

    tensors: every tensor of expected_tensors(config), in any order; a generator keeps memory at one tensor.
    dtype: ``float32``, ``bfloat16`` or ``float16`` (rounded to nearest even), or one of these for each name, or
    ``int8`` for one of matrices(config), given as a QuantizedTensor. files: further files of the directory such as
    ``tokenizer.vocab``. Raises CheckpointError, also for an existing ``path``.
    """
    shapes, allowed = expected_tensors(config), matrices(config)
    if not isinstance(dtype, str):
        dtype = dict(dtype)
        for name in [name for name, stored in dtype.items() if stored == INT8]:
            if name not in allowed:
                raise CheckpointError(f"{path}: tensor {shown(name)} cannot be int8; only matrices can")
            shapes[name + SCALE_SUFFIX], dtype[name + SCALE_SUFFIX] = scale_shape(shapes[name]), "uint16"
    extra = dict(files or {})
    for name in extra:
        if Path(name).name != name or name in (CONFIG_NAME, WEIGHTS_NAME, INDEX_NAME):
            raise CheckpointError(f"{name!r} cannot be an extra file of a checkpoint")
    with new_directory(Path(path)) as directory:
        try:
            write_safetensors(
                directory / WEIGHTS_NAME, shapes, _stored(tensors), dtype=dtype, metadata={"format": "pt"}
            )
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        for name, content in {**extra, CONFIG_NAME: serialise_model_config(config)}.items():
            (directory / name).write_bytes(content)


def _stored(tensors: Iterable[tuple[str, NDArray[Any] | QuantizedTensor]]) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, tensor in tensors:
        if isinstance(tensor, QuantizedTensor):
            yield name, tensor.values
            yield name + SCALE_SUFFIX, tensor.scales
        else:
            yield name, tensor


def parameter_count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Elements of all tensors of ``shapes``."""
    return sum(math.prod(shape) for shape in shapes.values())
