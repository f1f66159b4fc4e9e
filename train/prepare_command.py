"""``crucible-train prepare``: text to token shards."""

from __future__ import annotations

import argparse
import sys
import time

HELP = "text to token shards"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Encodes .txt (documents parted by lines of <|endoftext|>), .jsonl and .parquet files, also .gz, .xz and .zst, "
        "or a Hugging Face dataset. The same command goes on with a preparation that was stopped."
    )
    add = parser.add_argument
    add("--input", action="extend", nargs="+", default=[], metavar="PATH", help="files or directories")
    add("--dataset", metavar="NAME", help="a dataset of the Hugging Face Hub, streamed (needs --tokens)")
    add("--dataset-config", metavar="NAME", help="which of the dataset's configurations")
    add("--dataset-split", default="train", metavar="NAME", help="which of its splits (default: train)")
    add("--out", required=True, metavar="DIR", help="where the shards go")
    add("--tokens", type=_count, metavar="N", help="stop with the document that reaches so many tokens, such as 1e8")
    add("--vocabulary", default="gpt2", metavar="FILE", help="a tokenizer.vocab or tokenizer.json (default: gpt2)")
    add(
        "--vocabulary-size", "--tokenizer-vocab", type=_count, metavar="N",
        help="only the vocabulary's first N ranked tokens; the separator gets the id N",
    )  # fmt: skip
    add("--separator", default="<|endoftext|>", metavar="TOKEN", help="the token after each document")
    add("--text-field", default="text", metavar="NAME", help="the field that holds the text (default: text)")
    add("--val-fraction", type=float, default=0.01, metavar="F", help="share of the documents held out (default: 0.01)")
    add("--shard-tokens", type=_count, default=100_000_000, metavar="N", help="tokens a shard (default: 1e8)")
    add("--processes", type=_count, metavar="N", help="worker processes (default: all cores, 16 at most)")
    add("--restart", action="store_true", help="drop what an unfinished preparation left")
    add("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    from crucible_train.errors import TrainingError
    from crucible_train.prepare import prepare

    hub = None
    if args.dataset:
        from crucible_train.hub_source import HubSource

        if args.tokens is None:
            raise TrainingError("--dataset needs --tokens: a Hub dataset may have no end")
        hub = HubSource(args.dataset, args.dataset_config, args.dataset_split, args.text_field)
    begun = time.monotonic()
    manifest = prepare(
        args.input,
        args.out,
        vocabulary=args.vocabulary,
        vocabulary_size=args.vocabulary_size,
        separator=args.separator,
        text_field=args.text_field,
        val_fraction=args.val_fraction,
        shard_tokens=args.shard_tokens,
        limit_tokens=args.tokens,
        processes=args.processes,
        restart=args.restart,
        progress=not args.quiet,
        hub=hub,
    )
    seconds = time.monotonic() - begun
    total = sum(split.tokens for split in manifest.splits.values())
    for name, split in manifest.splits.items():
        print(f"{name}: {split.tokens} tokens, {split.documents} documents, {split.bytes} bytes of text")
    print(f"{args.out}: {total} tokens as {manifest.dtype} in {seconds:.1f} s; vocabulary {manifest.token_count} ids")
    if manifest.cut_documents:
        print(f"{manifest.cut_documents} documents were too long and were cut", file=sys.stderr)
    if not manifest.splits["val"].tokens:
        print("no document fell into the validation split; raise --val-fraction to have one", file=sys.stderr)
    return 0


def _count(text: str) -> int:
    """A whole number, also written 1e8."""
    try:
        value = float(text)
        if value != int(value):
            raise ValueError
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 5000 or 1e8") from None
    return int(value)
