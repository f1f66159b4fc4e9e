"""A real model, end to end: SmolLM2-135M-Instruct, pulled on first use, against transformers in float32."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crucible.checkpoint import open_checkpoint
from crucible.config.engine import PAGE_TOKENS
from crucible.models import resolve
from crucible.tokenizer import Tokenizer
from tests.direct_model import Model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NAME = "smollm2-135m-instruct"
PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "Photosynthesis is", "1, 2, 3, 4,",
    "Dear Sir or Madam,", "The three branches of government are", "In 1969, the first human", "Wasser kocht bei",
    "Q: Why is the sky blue?\nA:", "import numpy as np\n", "# Installation\n\n", "To make pancakes, mix",
    "Shakespeare wrote", "E = mc^2 means that", "My favourite colour is", "The speed of light is about",
    "SELECT name FROM users WHERE", "Whales are mammals because", "On Monday morning, the teacher",
]  # fmt: skip


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve(NAME)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.for_checkpoint(path)


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return Model(path, pages=256, context=1024)


@pytest.fixture(scope="module")
def hf_directory(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as a Hugging Face directory."""
    from safetensors.numpy import save_file

    directory = tmp_path_factory.mktemp("hf")
    with open_checkpoint(path) as checkpoint:
        c = checkpoint.config
        save_file({name: checkpoint.read(name) for name in checkpoint.names()}, directory / "model.safetensors")
    values = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_layers, "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads, "vocab_size": c.vocab_size, "rms_norm_eps": c.norm.eps,
        "max_position_embeddings": c.context_length, "rope_theta": 100000.0, "tie_word_embeddings": True,
        "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(values))
    return directory


@pytest.fixture(scope="module")
def peer(hf_directory: Path) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM.from_pretrained(hf_directory, dtype=torch.float32)


def test_greedy_tokens_and_logits_equal_transformers(model: Model, tokenizer: Tokenizer, peer: Any) -> None:
    import torch

    pages = list(range(16))
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        first = len(ids)
        rows = [model.run((ids, 0, pages))[0]]
        for _ in range(63):
            ids.append(int(rows[-1].argmax()))
            rows.append(model.run(([ids[-1]], len(ids) - 1, pages))[0])
        with torch.no_grad():
            theirs = peer(torch.tensor([ids])).logits[0, first - 1 :].numpy()
        ours = np.stack(rows)
        error = np.abs(ours - theirs)
        assert (error.max(axis=1) <= 1e-4 * np.abs(theirs).max(axis=1)).all(), prompt
        near = 10 * error.max()
        for mine, other in zip(ours, theirs, strict=True):
            order, wanted = np.argsort(-mine)[:10], np.argsort(-other)[:10]
            for a, b in zip(order, wanted, strict=True):
                assert a == b or abs(other[a] - other[b]) < near, prompt


def test_hf_directory_gives_the_bits_of_the_gguf_import(path: Path, hf_directory: Path, model: Model) -> None:
    other = Model(hf_directory, pages=16)
    ids = [1, 504, 3575, 282, 4649, 314]
    assert np.array_equal(model.run((ids, 0, [3])), other.run((ids, 0, [5])))


@pytest.mark.parametrize("quant", ["f32", "int8"])
def test_paged_equals_contiguous_bit_for_bit_across_the_boundaries(path: Path, quant: str) -> None:
    model = Model(path, pages=200, quant=quant, context=600)
    ids = np.random.default_rng(0).integers(0, 49152, 513).tolist()
    shuffled = np.random.default_rng(1).permutation(200)[:33].tolist()
    lengths = {1, 15, 16, 17, 33, 127, 128, 129, 511, 512, 513}
    steps = {}
    for position, token in enumerate(ids):  # one token at a time over shuffled pages
        row = model.run(([token], position, shuffled))
        if position + 1 in lengths:
            steps[position + 1] = row[0]
    consecutive = list(range(-(-len(ids) // PAGE_TOKENS)))
    for length in sorted(lengths):  # each prefix at once over consecutive pages: no cache
        assert np.array_equal(model.run((ids[:length], 0, consecutive))[0], steps[length]), length


def test_int8_costs_less_than_two_thousandths_of_a_nat(path: Path, tokenizer: Tokenizer, model: Model) -> None:
    """On text written after the model was trained: this project's documentation.

    The divergence of the predicted distributions is what int8 costs on average; the loss itself is far noisier.
    """
    root = Path(__file__).parent.parent
    text = "\n".join(page.read_text() for page in sorted(root.glob("docs/**/*.md")))
    quantised = Model(path, quant="int8", pages=64, context=1024)
    divergences, differences, losses = [], [], []
    for start in range(0, 4096, 1024):
        ids = tokenizer.encode(text)[start : start + 1024]
        plain, rounded = (log_probabilities(m, ids) for m in (model, quantised))
        divergences.append((np.exp(plain) * (plain - rounded)).sum(axis=1))
        rows = np.arange(len(ids) - 1)
        losses.append(-plain[rows, ids[1:]])
        differences.append(plain[rows, ids[1:]] - rounded[rows, ids[1:]])
    difference = np.concatenate(differences)
    assert 2 < np.concatenate(losses).mean() < 5
    assert 0 < np.concatenate(divergences).mean() <= 0.002
    assert difference.mean() <= 0.002 + 2 * difference.std() / math.sqrt(len(difference))


def log_probabilities(model: Model, ids: list[int]) -> np.ndarray:
    """Log-probabilities float64 [len(ids) - 1, vocab] of what follows each position but the last."""
    logits = model.run((ids, 0, list(range(64))), all_rows=True)[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits


def test_it_knows_the_capital_of_france() -> None:
    from crucible import LLM

    with LLM(NAME) as llm:
        reply = llm.chat([{"role": "user", "content": "What is the capital of France?"}])[0]
    assert reply.text == "The capital of France is Paris."
    assert reply.finish_reason == "stop"
    assert reply.completion_tokens == 8  # seven and the end of sequence
