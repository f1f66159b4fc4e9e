"""``crucible-train quickstart``: a trained, exported, answering model from the bundled text, in minutes on a CPU."""

from __future__ import annotations

import argparse
import shlex

HELP = "train, export and ask a small model on a bundled text, in minutes on a CPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prepares four public-domain novels, trains a two-million-parameter model on them, exports it and lets it "
        "answer: under 5 minutes on two cores. The same command goes on with one that was interrupted."
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="where data, run and model go")
    parser.add_argument("--prompt", metavar="TEXT", help="what the model is to go on from")


def run(args: argparse.Namespace) -> int:
    from crucible_train.quickstart import PROMPT, quickstart

    outcome = quickstart(args.out, prompt=args.prompt or PROMPT, say=_say)
    model = shlex.quote(f"{args.out}/model")
    _say(f"\n{outcome.answer}\n")
    _say(f"Validation loss {outcome.val_loss:.3f} nats a token ({outcome.bits_per_byte:.3f} bits per byte).")
    _say(
        f"Counting alone reaches {outcome.unigram:.3f} (unigram entropy) and {outcome.bigram:.3f} (interpolated bigram)"
        f" on the same text: {outcome.unigram - outcome.val_loss:.3f} and {outcome.bigram - outcome.val_loss:.3f} more."
    )
    _say(f"All of it took {outcome.seconds:.0f} s. What can be done with the model now:\n")
    _say(f"  crucible generate {model} --raw --temperature 0.7 --prompt 'Mr. Darcy looked at her and said,'")
    _say(f"  crucible-serve {model} --port 8080")
    _say('  curl -N localhost:8080/v1/generate/stream -d \'{"prompt": "Emma was", "temperature": 0.7}\' \\')
    _say("      -H 'Content-Type: application/json'")
    _say(f"  crucible-train export-gguf {shlex.quote(f'{args.out}/run')} {shlex.quote(f'{args.out}/model.gguf')}")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)
