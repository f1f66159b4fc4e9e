"""``crucible-train sample``: text from a trained model, without the engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from crucible_train.errors import TrainingError

HELP = "continue a text with a trained model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="run directory (its best checkpoint is taken) or model directory")
    add("--prompt", default="", metavar="TEXT", help="default: the start of a document")
    add("--max-tokens", type=int, default=128, metavar="N", help="(default 128)")
    add("--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (default 0.8)")
    add("--top-k", type=int, default=40, metavar="K", help="0: all tokens (default 40)")
    add("--seed", type=int, default=0, metavar="N", help="(default 0)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")


def run(args: argparse.Namespace) -> int:
    from crucible.checkpoint import open_checkpoint
    from crucible.model_text import ModelText
    from crucible_train.distributed import choose_device
    from crucible_train.export_source import find_checkpoint
    from crucible_train.sampling import continue_tokens
    from crucible_train.tensors import load_checkpoint_tensors
    from crucible_train.transformer import Transformer

    if args.max_tokens < 1:
        raise TrainingError(f"--max-tokens must be at least 1, got {args.max_tokens}")
    path, device = find_checkpoint(Path(args.model)), choose_device(args.device)
    with open_checkpoint(path) as checkpoint:
        model = Transformer(checkpoint.config)
        load_checkpoint_tensors(model, checkpoint.read)
    model.to(device)
    config, tokenizer = model.config, ModelText(path, model.config).required()
    prompt = tokenizer.encode(args.prompt) or config.eos_token_ids[:1]
    ids = continue_tokens(
        model.logits,
        config,
        prompt,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
        device=device,
    )
    print(args.prompt + tokenizer.decode(ids))
    return 0
