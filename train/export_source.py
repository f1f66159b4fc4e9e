"""What is exported: the checkpoint, vocabulary and chat template behind a run directory or a model directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
from numpy.typing import NDArray

from crucible.checkpoint import Checkpoint, check_finite, expected_tensors, open_checkpoint
from crucible.config.model import ModelConfig
from crucible.errors import CheckpointError, TokenizerError
from crucible.importers.hf import WEIGHTS_NAME
from crucible.json_file import read_json
from crucible.model_text import check_vocabulary
from crucible.safetensors_file import to_bfloat16, to_float32, write_safetensors
from crucible.tokenizer import JSON_FILE, VOCABULARY_FILE, Tokenizer
from crucible.vocabulary import Vocabulary
from crucible_train.errors import TrainingError
from crucible_train.export_options import DTYPES
from crucible_train.vocabularies import SEPARATOR

CHECKPOINTS = ("best", "last")
TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True)
class ExportSource:
    """An open checkpoint and its text side; a context manager that closes the checkpoint.

    ``config`` is the checkpoint's, with the document separator as eos where it names none: that is where a base model
    stops.
    """

    path: Path
    checkpoint: Checkpoint
    config: ModelConfig
    vocabulary: Vocabulary | None
    chat_template: str | None

    def __enter__(self) -> ExportSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.checkpoint.close()

    def needed_vocabulary(self) -> Vocabulary:
        """The vocabulary. Raises TrainingError where there is none."""
        if self.vocabulary is None:
            raise TrainingError(f"{self.path}: no {VOCABULARY_FILE} beside the weights; copy the run's there")
        return self.vocabulary


def open_source(source: str | Path, which: str | None = None) -> ExportSource:
    """Opens what ``source`` means (see ``find_checkpoint``) and checks every weight and the vocabulary.

    Raises CheckpointError, TokenizerError or TrainingError, one line, for whatever cannot be exported.
    """
    path = find_checkpoint(Path(source), which)
    vocabulary = read_vocabulary(path)
    checkpoint = open_checkpoint(path)
    try:
        if vocabulary is not None:
            check_vocabulary(path, checkpoint.config, Tokenizer(vocabulary))
        check_finite(checkpoint)
        config = with_separator(checkpoint.config, vocabulary)
        return ExportSource(path, checkpoint, config, vocabulary, _chat_template(path))
    except BaseException:
        checkpoint.close()
        raise


def find_checkpoint(source: Path, which: str | None = None) -> Path:
    """The model directory that ``source`` means.

    ``source`` is a model directory, a run's checkpoint (with ``model/`` in it) or a run directory, whose ``best``
    checkpoint is taken, or ``last`` where there is no best; ``which`` names one. Raises TrainingError.
    """
    if not source.is_dir():
        raise TrainingError(f"{source}: no such run or model directory")
    if (source / "checkpoints").is_dir():
        names = CHECKPOINTS if which is None else (which,)
        for name in names:
            if (found := source / "checkpoints" / name / "model").is_dir():
                return found
        raise TrainingError(f"{source}: the run has no {' or '.join(names)} checkpoint yet")
    if which is not None:
        raise TrainingError(f"{source}: not a run directory, so it has no {which} checkpoint")
    if (source / "model").is_dir():
        return source / "model"
    if not (source / "config.json").is_file():
        raise TrainingError(f"{source}: neither a run directory nor a model directory (no config.json)")
    return source


def with_separator(config: ModelConfig, vocabulary: Vocabulary | None) -> ModelConfig:
    """``config`` with ``<|endoftext|>`` as its eos if it has none and the vocabulary has that token."""
    if config.eos_token_ids or vocabulary is None or SEPARATOR not in vocabulary.special_tokens:
        return config
    return msgspec.structs.replace(config, eos_token_ids=[vocabulary.special_tokens[SEPARATOR]])


def stored_dtype(checkpoint: Checkpoint, asked: str | None) -> str:
    """The type to store weights in: ``asked``, else the checkpoint's own where the exports have it, else float32."""
    return asked or (checkpoint.dtype if checkpoint.dtype in DTYPES else "float32")


def write_model(directory: Path, opened: ExportSource, dtype: str, files: Mapping[str, bytes]) -> None:
    """The weights of ``opened`` as ``dtype``, and ``files`` beside them, in an empty directory."""
    checkpoint = opened.checkpoint
    write_safetensors(
        directory / WEIGHTS_NAME,
        expected_tensors(opened.config),
        ((name, checkpoint.read(name)) for name in checkpoint.names()),
        dtype=dtype,
        metadata={"format": "pt"},
    )
    for name, content in files.items():
        (directory / name).write_bytes(content)


def rounded_reader(checkpoint: Checkpoint, dtype: str) -> Callable[[str], NDArray[np.float32]]:
    """Reads a tensor of ``checkpoint`` as float32 with the values that storing it as ``dtype`` leaves."""

    def read(name: str) -> NDArray[np.float32]:
        values = checkpoint.read(name)
        if dtype == "bfloat16":
            return to_float32(to_bfloat16(values))
        return values.astype(np.float16).astype(np.float32) if dtype == "float16" else values

    return read


def read_vocabulary(path: Path) -> Vocabulary | None:
    """``tokenizer.vocab`` or ``tokenizer.json`` in ``path``; beside a run's ``model/``, else None."""
    places = [path, path.parent] if path.name == "model" else [path]
    for directory in places:
        if (file := directory / VOCABULARY_FILE).is_file():
            return Vocabulary.from_file(file)
        if (file := directory / JSON_FILE).is_file():
            try:
                return Vocabulary.from_tokenizer_json(file.read_bytes())
            except TokenizerError as error:
                raise TokenizerError(f"{file}: {error}") from None
    return None


def _chat_template(path: Path) -> str | None:
    """The model's chat template as text, from the file of that name or tokenizer_config.json."""
    try:
        if (file := path / TEMPLATE_FILE).is_file():
            return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from None
    settings = path / "tokenizer_config.json"
    template = read_json(settings).get("chat_template") if settings.is_file() else None
    return template if isinstance(template, str) else None
