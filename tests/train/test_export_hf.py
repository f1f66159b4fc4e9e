"""Llama directories: transformers computes our logits and encodes our ids; a wrong file never appears."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crucible.checkpoint import open_checkpoint
from crucible.tokenizer import Tokenizer
from crucible_train import export_hf as module
from crucible_train.errors import TrainingError
from crucible_train.export_hf import export_hf, probe_tokens, transformers_logits
from crucible_train.export_source import open_source
from crucible_train.llama_forward import llama_logits
from crucible_train.vocabularies import load_vocabulary, truncated
from tests.checkpoints import Alibi, Biases, Learned, LinearScaling, NoPosition, Norm, Rope, make_checkpoint
from tests.conftest import CHAT_TEMPLATE, make_text_checkpoint
from tests.direct_model import Model

BASE = truncated(load_vocabulary("gpt2"), 512)


def make_base(directory: Path, **changes: Any) -> Path:
    """A base model of 512 GPT-2 ranks: the separator is id 512, rows up to 575 are padding."""
    values = {"vocab_size": 576, "token_count": 513, "bos_token_id": None, "eos_token_ids": [512], **changes}
    return make_checkpoint(directory, files={"tokenizer.vocab": BASE.to_bytes()}, **values)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_embeddings": False, "position": Rope(theta=500.0, pairing="half", scaling=None)},
        {"num_kv_heads": 1, "head_dim": 16, "norm": Norm(type="rmsnorm", placement="pre", eps=1e-3, bias=False)},
        {"num_kv_heads": 4, "biases": Biases(qkv=True, attention_output=True, mlp=True)},
    ],
    ids=["tied", "untied-theta", "wide-heads-eps", "biases"],
)
def test_transformers_and_the_engine_give_the_source_s_logits(tmp_path: Path, changes: dict[str, Any]) -> None:
    source = make_base(tmp_path / "m", **changes)
    out = export_hf(source, tmp_path / "hf")
    with open_source(source) as opened:
        tokens = probe_tokens(opened.config)[:1]
    theirs = transformers_logits(out, tokens)[0].numpy()
    pages = list(range(4))
    for path in (source, out):
        ours = Model(path).run((tokens[0].tolist(), 0, pages), all_rows=True)
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
        assert (np.argsort(-ours[-1])[:10] == np.argsort(-theirs[-1])[:10]).all()


def test_the_config_states_what_changes_the_graph(tmp_path: Path) -> None:
    out = export_hf(make_base(tmp_path / "m", head_dim=16), tmp_path / "hf")
    config = json.loads((out / "config.json").read_bytes())
    assert config["architectures"] == ["LlamaForCausalLM"]
    wanted = {"model_type": "llama", "head_dim": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
              "vocab_size": 576, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "eos_token_id": 512,
              "torch_dtype": "float32"}  # fmt: skip
    assert {name: config[name] for name in wanted} == wanted
    with open_checkpoint(out) as checkpoint:
        assert "lm_head.weight" not in checkpoint.names()
        assert (checkpoint.config.token_count, checkpoint.config.eos_token_ids) == (513, [512])


def test_transformers_loads_a_tokenizer_that_encodes_as_ours(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = make_base(tmp_path / "m")
    out = export_hf(source, tmp_path / "hf")
    theirs, ours = AutoTokenizer.from_pretrained(out), Tokenizer.for_checkpoint(source)
    for text in ("The World is a stage", "  naïve\n\n 12345 don't\t", "日本語 🙂"):
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert (theirs.eos_token, theirs.eos_token_id) == ("<|endoftext|>", 512)
    assert Tokenizer.for_checkpoint(out).encode("The World is a stage") == ours.encode("The World is a stage")


def test_a_chat_template_comes_along(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    out = export_hf(make_text_checkpoint(tmp_path / "m", chat=True), tmp_path / "hf")
    text = AutoTokenizer.from_pretrained(out).apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"
    assert (out / "chat_template.jinja").read_text() == CHAT_TEMPLATE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_compared_with_the_rounded_model(tmp_path: Path, dtype: str) -> None:
    out = export_hf(make_base(tmp_path / "m"), tmp_path / "hf", dtype=dtype)
    with open_checkpoint(out) as checkpoint:
        assert checkpoint.dtype == dtype


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position": Alibi()}, "position must be rope, not alibi"),
        ({"position": Learned()}, "position must be rope, not learned"),
        ({"position": NoPosition()}, "position must be rope, not noposition"),
        ({"activation": "gelu"}, "activation must be swiglu, not gelu"),
        ({"norm": Norm(type="layernorm", placement="pre", eps=1e-5, bias=True)}, "norm must be rmsnorm"),
        ({"norm": Norm(type="rmsnorm", placement="post", eps=1e-5, bias=False)}, "norm placement must be pre"),
        ({"biases": Biases(qkv=True, attention_output=False, mlp=False)}, "biases must be on all"),
        ({"position": Rope(theta=1e4, pairing="interleaved", scaling=None)}, "pairing must be half"),
        ({"position": Rope(theta=1e4, pairing="half", scaling=LinearScaling(factor=2.0))}, "scaling must be none"),
    ],
)
def test_what_is_no_plain_llama_is_refused_by_axis(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    from crucible_train.export_gguf import export_gguf

    source = make_base(tmp_path / "m", **changes)
    for export, target in ((export_hf, tmp_path / "hf"), (export_gguf, tmp_path / "m.gguf")):
        with pytest.raises(TrainingError, match=words) as caught:
            export(source, target)
        assert "\n" not in str(caught.value)
        assert not target.exists()


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps", "tie_word_embeddings"])
def test_other_logits_are_noticed_before_the_directory_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    honest = module.llama_config
    wrong = {"rope_theta": 5e5, "rms_norm_eps": 0.5, "tie_word_embeddings": True}[key]
    monkeypatch.setattr(module, "llama_config", lambda *given: honest(*given) | {key: wrong})
    source = make_base(tmp_path / "m", tied_embeddings=False)
    with pytest.raises(TrainingError, match="nothing was written: the logits of"):
        export_hf(source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_without_transformers_the_independent_forward_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    out = export_hf(make_base(tmp_path / "m"), tmp_path / "hf")
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.allclose(llama_logits(out, tokens), transformers_logits(out, tokens), atol=1e-4)
