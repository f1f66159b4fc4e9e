"""Export to a Hugging Face Llama directory, its logits verified before it appears under its name."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crucible.checkpoint import CONFIG_NAME
from crucible.config.model import ModelConfig
from crucible.tokenizer import JSON_FILE
from crucible_train.errors import TrainingError
from crucible_train.export_source import (
    TEMPLATE_FILE,
    ExportSource,
    open_source,
    rounded_reader,
    stored_dtype,
    write_model,
)
from crucible_train.export_target import export_directory
from crucible_train.export_tokenizer import check_same, tokenizer_json, tokenizer_settings
from crucible_train.plain_llama import require_plain_llama

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-4
"""Of the largest |logit|: float32 summed in another order stays far below, a wrong axis far above."""

PROBE_LENGTH = 48


def export_hf(source: str | Path, target: str | Path, *, dtype: str | None = None, which: str | None = None) -> Path:
    """Writes a LlamaForCausalLM directory with tokenizer to ``target``; returns ``target``.

    source, dtype, which and the replacing of an older export: as ``export_native``. Before the directory appears, the
    logits of its files, by transformers where it is installed and by ``llama_logits``, are compared with those of the
    trained model. Raises CrucibleError, one line: for a model that is no plain Llama and for logits that differ.
    """
    target = Path(target)
    with open_source(source, which) as opened:
        require_plain_llama(opened.config, "a Llama directory")
        dtype = stored_dtype(opened.checkpoint, dtype)
        files = text_files(opened)
        files[CONFIG_NAME] = _json(llama_config(opened.config, dtype))
        files["generation_config.json"] = _json(generation_config(opened.config))
        with export_directory(target, opened.path) as directory:
            write_model(directory, opened, dtype, files)
            verify(directory, opened.config, rounded_reader(opened.checkpoint, dtype))
    return target


def llama_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """``config`` in the words of transformers' LlamaConfig; every field that changes the graph is stated."""
    rope = require_plain_llama(config, "a Llama directory")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm.eps,
        "rope_theta": rope.theta,
        "rope_scaling": None,
        "attention_bias": config.biases.qkv,
        "mlp_bias": config.biases.mlp,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        **_text_ids(config),
    }


def generation_config(config: ModelConfig) -> dict[str, Any]:
    """The ids at which transformers' generate starts and stops."""
    return _text_ids(config)


def _text_ids(config: ModelConfig) -> dict[str, Any]:
    eos = config.eos_token_ids
    return {"bos_token_id": config.bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}


def text_files(opened: ExportSource) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and the chat template; none of them for a model without a vocabulary."""
    files: dict[str, bytes] = {}
    config, template = opened.config, opened.chat_template
    if opened.vocabulary is not None:
        files[JSON_FILE] = tokenizer_json(opened.vocabulary)
        check_same(opened.vocabulary, files[JSON_FILE])
        eos = config.eos_token_ids[0] if config.eos_token_ids else None
        settings = tokenizer_settings(opened.vocabulary, config.context_length, config.bos_token_id, eos)
        files["tokenizer_config.json"] = _json(settings)
    if template is not None:
        files[TEMPLATE_FILE] = template.encode()
    return files


def verify(directory: Path, config: ModelConfig, read: Callable[[str], NDArray[np.float32]]) -> None:
    """Compares the logits of ``directory`` with those of the trained model made of ``config`` and ``read``.

    Raises TrainingError where any differs by more than TOLERANCE of the largest.
    """
    from crucible_train.llama_forward import llama_logits

    tokens = probe_tokens(config)
    expected = trained_logits(config, read, tokens)
    candidates = {"an independent forward": llama_logits}
    if importlib.util.find_spec("transformers") is not None:
        candidates["transformers"] = transformers_logits
    scale = float(expected.abs().max())
    for name, forward in candidates.items():
        worst = float((forward(directory, tokens) - expected).abs().max())
        if not worst <= TOLERANCE * scale:  # NaN fails too
            fault = f"the logits of {name} differ from the trained model's by {worst:.3g} (the largest is {scale:.3g})"
            raise TrainingError(f"nothing was written: {fault}")


def probe_tokens(config: ModelConfig) -> Tensor:
    """Two rows of ids, the same at every call, int64 [2, up to PROBE_LENGTH]."""
    import torch

    length = min(PROBE_LENGTH, config.context_length)
    generator = torch.Generator().manual_seed(20)
    return torch.randint(config.token_count, (2, length), generator=generator)


def trained_logits(config: ModelConfig, read: Callable[[str], NDArray[np.float32]], tokens: Tensor) -> Tensor:
    """Float32 logits of the Transformer that training runs, on the CPU."""
    import torch

    from crucible_train.tensors import load_checkpoint_tensors
    from crucible_train.transformer import Transformer

    model = Transformer(config)
    load_checkpoint_tensors(model, read)
    model.eval()
    with torch.no_grad():
        logits: Tensor = model.logits(tokens).float()
    return logits


def transformers_logits(directory: Path, tokens: Tensor) -> Tensor:
    """Float32 logits by transformers' own model of the directory."""
    import torch
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        logits: Tensor = model.eval()(tokens).logits.float()
    return logits


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, indent=2).encode() + b"\n"
