"""``crucible-train train``: one training run."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from crucible_train.errors import TrainingError
from crucible_train.run_config import ARCHITECTURE, RunConfig

HELP = "train a model on prepared data"

FLAGS = {
    "data": "directory that prepare wrote",
    "out": "run directory; default runs/NAME",
    "preset": "size of the model (crucible-train presets lists them)",
    "attention": "how KV heads are shared",
    "position": "positional encoding",
    "activation": "of the feed-forward part",
    "norm": "kind of normalisation",
    "placement": "of the normalisation",
    "tied": "one matrix for embedding and head",
    "context_length": "tokens a sequence; default the preset's",
    "steps": "updates to train for",
    "schedule_steps": "length of the learning-rate schedule, where the run will later go on beyond --steps",
    "batch": "sequences a micro-batch and device",
    "grad_accum": "micro-batches an update",
    "lr": "highest learning rate; default the preset's",
    "min_lr_ratio": "lowest learning rate as a share of it",
    "warmup_steps": "default a twentieth of the schedule",
    "schedule": "after the warm-up: cosine decay, or wsd: a plateau, then linear decay",
    "decay_fraction": "share of the wsd schedule that decays",
    "optimizer": "muon takes the hidden matrices, adamw the rest",
    "betas": "of AdamW",
    "weight_decay": "of matrices",
    "clip": "largest norm of the gradient",
    "dtype": "of the matrix products; auto is bfloat16 on a GPU, else float32",
    "matmul": "precision of the products, of the head's alone with fp8-head; on a GPU FP8 needs sm_89 or later",
    "gqa": "attention with shared KV heads: fused, or with the heads copied",
    "compile": "use torch.compile; default on a GPU only",
    "seed": "of the initial weights",
    "data_seed": "of the data order; default --seed",
    "eval_every": "updates between evaluations; 0: only at the end",
    "eval_tokens": "validation tokens of one; 0: all",
    "save_every": "updates between checkpoints; 0: only at the end and for a best loss",
    "sample_every": "updates between text samples; 0: none",
    "device": "auto takes a GPU if there is one",
    "zero1": "share the optimizer state out over the processes of torchrun",
    "init_from": "native checkpoint or run directory to fine-tune; brings its own architecture",
    "tensorboard": "also write OUT/tensorboard (needs the package tensorboard)",
}
ALIASES = {"context_length": ["--block"], "schedule_steps": ["--max-steps-schedule"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of RunConfig, and --name and --resume."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(RunConfig)}
    for field, hint in get_type_hints(RunConfig).items():
        default = defaults.get(field)
        text = FLAGS[field] + ("" if default in (None, False) or field in ("data", "out") else f" (default {default})")
        names = [f"--{field.replace('_', '-')}", *ALIASES.get(field, [])]
        required = field == "data"
        parser.add_argument(
            *names,
            dest=field,
            required=required,
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **_kind(hint),
        )
    parser.add_argument("--name", help="short for --out runs/NAME")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")


def _kind(hint: Any) -> dict[str, Any]:
    """argparse's options for a field of type ``hint``."""
    alternatives = [kind for kind in get_args(hint) if kind is not type(None)]
    if bool in (hint, *alternatives):
        return {"nargs": "?", "const": True, "type": _switch, "metavar": "0|1"}
    if get_origin(hint) is tuple:
        return {"nargs": 2, "type": float, "metavar": ("B1", "B2")}
    if alternatives and all(isinstance(kind, str) for kind in alternatives):
        return {"choices": alternatives}
    kind = hint if isinstance(hint, type) else alternatives[0]
    return {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"must be 0 or 1, got {text!r}")
    return text == "1"


def parse_config(args: argparse.Namespace) -> RunConfig:
    """The flags as a checked RunConfig. Raises TrainingError for values that cannot go together."""
    given = {field: value for field, value in vars(args).items() if field in RunConfig.__struct_fields__}
    if args.name is not None:
        if "out" in given:
            raise TrainingError("--name and --out say the same thing; give one of them")
        if not args.name or "/" in args.name or args.name in (".", ".."):
            raise TrainingError(f"--name must be a plain name, got {args.name!r}; use --out for a path")
        given["out"] = os.path.join("runs", args.name)
    elif "out" not in given:
        raise TrainingError("say where the run is kept: --out DIR, or --name NAME for runs/NAME")
    if "init_from" in given:
        clash = next((field for field in ARCHITECTURE if field in given), None)
        if clash is not None:
            raise TrainingError(f"--{clash} cannot be chosen with --init-from, whose architecture is kept")
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    config = RunConfig(**given)
    config.check()
    return config


def run(args: argparse.Namespace) -> int:
    config = parse_config(args)
    import torch

    from crucible_train.compile_failure import readable_compile_failure
    from crucible_train.pretrain import pretrain

    try:
        with readable_compile_failure("--compile 0 trains without"):
            result = pretrain(config, resume=args.resume)
    except torch.OutOfMemoryError:
        raise TrainingError(
            f"not enough GPU memory for --batch {config.batch}; lower it and raise --grad-accum by the same factor"
        ) from None
    if result.stopped_by is not None:
        return 128 + result.stopped_by
    if not int(os.environ.get("RANK", "0")):
        print(result.summary(config.out), file=sys.stdout)
    return 0
