"""GGUF files: their fields, their way back through our importer, and llama.cpp's own greedy text where it is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from crucible.checkpoint import open_checkpoint
from crucible.config.model import ModelConfig
from crucible.importers.gguf import import_gguf, unpermute
from crucible.tokenizer import Tokenizer, Vocabulary
from crucible_train.errors import TrainingError
from crucible_train.export_gguf import export_gguf, permute, token_fields
from crucible_train.vocabularies import load_vocabulary
from tests.checkpoints import Biases, make_checkpoint, tiny_config
from tests.conftest import CHAT_TEMPLATE
from tests.train.test_export_hf import make_base

GPT2 = load_vocabulary("gpt2")
BYTES = [bytes([byte]) for byte in range(256)]


def make_gpt2(directory: Path, **changes: Any) -> Path:
    """GPT-2's vocabulary in 50304 rows."""
    values = {"vocab_size": 50304, "token_count": 50257, "bos_token_id": None, "eos_token_ids": [50256], **changes}
    return make_checkpoint(directory, files={"tokenizer.vocab": GPT2.to_bytes()}, **values)


def fields(path: Path) -> Any:
    reader = gguf.GGUFReader(path)
    return reader, lambda key: reader.fields[key].contents()


def test_the_fields_that_a_gpt2_vocabulary_needs(tmp_path: Path) -> None:
    reader, field = fields(export_gguf(make_gpt2(tmp_path / "m"), tmp_path / "m.gguf"))
    assert field("general.architecture") == "llama"
    assert (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")) == ("gpt2", "gpt-2")
    tokens, types, merges = (field(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type", "merges"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tokens) == len(set(tokens)) == len(types) == int(tensors["token_embd.weight"].shape[-1]) == 50304
    assert (len(merges), merges[0], field("tokenizer.ggml.eos_token_id")) == (50000, "Ġ t", 50256)
    assert tokens[50256] == "<|endoftext|>"
    assert types[50255:50258] == [1, 3, 5]
    assert set(types[50257:]) == {5}
    assert field("tokenizer.ggml.add_bos_token") is False
    assert all(tensor.tensor_type.name == "F32" for tensor in reader.tensors)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_embeddings": False, "num_kv_heads": 4}, {"biases": Biases(qkv=True, attention_output=True, mlp=True)}],
    ids=["tied", "untied", "biases"],
)
def test_the_way_back_gives_the_same_checkpoint_bit_for_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    source = make_base(tmp_path / "m", **changes)
    back = import_gguf(export_gguf(source, tmp_path / "m.gguf"), tmp_path / "back")
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()
    with open_checkpoint(source) as before, open_checkpoint(back) as after:
        for name in before.names():
            assert before.read(name).tobytes() == after.read(name).tobytes(), name
    text = "The World is  a stage\n\n 123 naïve"
    assert Tokenizer.for_checkpoint(back).encode(text) == Tokenizer.for_checkpoint(source).encode(text)


def test_permute_interleaves_the_halves_of_every_head() -> None:
    rows = np.arange(16, dtype=np.float32)[:, None]
    assert permute(rows, 2)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert (unpermute(permute(rows, 2), 2) == rows).all()


@pytest.mark.parametrize(("outtype", "matrix", "error"), [("f16", "F16", 2**-11), ("q8_0", "Q8_0", 1 / 127)])
def test_smaller_types_keep_vectors_in_float32(tmp_path: Path, outtype: str, matrix: str, error: float) -> None:
    source = make_base(tmp_path / "m", intermediate_size=64)
    out = export_gguf(source, tmp_path / "m.gguf", outtype=outtype)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert {kind for name, kind in kinds.items() if "norm" in name} == {"F32"}
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {matrix}
    back = import_gguf(out, tmp_path / "back")
    with open_checkpoint(source) as before, open_checkpoint(back) as after:
        for name in before.names():
            values = before.read(name)
            assert np.abs(values - after.read(name)).max() <= error * np.abs(values).max()


def test_rows_that_q8_0_cannot_hold_become_f16(tmp_path: Path) -> None:
    out = export_gguf(make_base(tmp_path / "m", intermediate_size=48), tmp_path / "m.gguf", outtype="q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")


def test_chat_models_keep_their_template_and_ends(tmp_path: Path) -> None:
    source = make_base(tmp_path / "m", eos_token_ids=[511, 512])
    (source / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _, field = fields(out := export_gguf(source, tmp_path / "m.gguf"))
    assert field("tokenizer.chat_template") == CHAT_TEMPLATE
    assert (field("tokenizer.ggml.eos_token_id"), field("tokenizer.ggml.eot_token_id")) == (511, 512)
    with open_checkpoint(import_gguf(out, tmp_path / "back")) as checkpoint:
        assert checkpoint.config.eos_token_ids == [511, 512]


def small(config: dict[str, Any], **changes: Any) -> tuple[Vocabulary, ModelConfig]:
    return Vocabulary(**{"pattern": "gpt2", "tokens": [*BYTES, b"th"], **changes}), tiny_config(**config)


def test_padding_never_takes_a_name_that_is_in_use() -> None:
    tokens = [*BYTES, b"th", b"[PAD258]", b"", b"<s>"]
    named = token_fields(*small({"vocab_size": 261, "token_count": 261}, tokens=tokens, special=frozenset({257, 259})))
    assert named["tokens"][256:] == ["th", "[PAD258]", "[[PAD258]]", "<s>", "[PAD260]"]
    assert named["token_type"][256:] == [1, 3, 5, 3, 5]


def test_what_llama_cpp_would_read_otherwise_is_refused() -> None:
    rows = {"vocab_size": 300, "token_count": 256}
    for changes, words in [
        ({"tokens": BYTES}, "without merges"),
        ({"pattern": "llama3", "whole_pieces": False}, "without whole pieces"),
        ({"tokens": [*BYTES, b"th", b"abc"]}, "1 tokens that no merge makes"),
        ({"prefix_ids": (3, 4)}, "go before every text"),
    ]:
        with pytest.raises(TrainingError, match=words):
            token_fields(*small(rows, **changes))


def test_a_vocabulary_and_a_known_type_are_needed(tmp_path: Path) -> None:
    bare = make_checkpoint(tmp_path / "bare")
    with pytest.raises(TrainingError, match=r"no tokenizer\.vocab"):
        export_gguf(bare, tmp_path / "x.gguf")
    with pytest.raises(TrainingError, match="outtype must be one of"):
        export_gguf(bare, tmp_path / "x.gguf", outtype="q4_0")
    assert not (tmp_path / "x.gguf").exists()


def test_a_killed_export_leaves_no_file_under_the_final_name(tmp_path: Path) -> None:
    source, target = make_gpt2(tmp_path / "m", hidden_size=256, head_dim=64), tmp_path / "out" / "m.gguf"
    code = f"from crucible_train.export_gguf import export_gguf; export_gguf({str(source)!r}, {str(target)!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline and not list(tmp_path.glob("out/.m.gguf.*")):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(tmp_path.glob("out/.m.gguf.*.partial"))
    assert not target.exists()
    export_gguf(source, target)
    first = target.stat().st_ino
    export_gguf(source, target, outtype="q8_0")
    assert target.stat().st_ino != first
    assert gguf.GGUFReader(target).fields["general.file_type"].contents() == 7


@pytest.mark.slow
def test_llama_cpp_writes_the_same_64_tokens(tmp_path: Path) -> None:
    """Needs $CRUCIBLE_LLAMA_SIMPLE, llama.cpp's llama-simple, and the pulled SmolLM2."""
    from crucible.config.sampling import SamplingParams
    from crucible.llm import LLM
    from crucible.models import pulled_directory

    program = os.environ.get("CRUCIBLE_LLAMA_SIMPLE", "")
    source = pulled_directory("smollm2-135m-instruct")
    if not Path(program).is_file() or not source.is_dir():
        pytest.skip("set CRUCIBLE_LLAMA_SIMPLE to llama.cpp's llama-simple and run: crucible pull")
    out = export_gguf(source, tmp_path / "m.gguf")
    for prompt in ("The history of Rome begins with", "def fibonacci(n):", "Once upon a time"):
        command = [program, "-m", str(out), "-n", "64", prompt]
        theirs = subprocess.run(command, capture_output=True, check=True).stdout.decode()
        with LLM(source, quant="f32", max_batch=1) as llm:
            ids = llm.encode(prompt)
            ours = llm.generate([ids], SamplingParams(max_tokens=64, temperature=0.0))[0].text
        assert theirs.removesuffix("\n") == prompt + ours
