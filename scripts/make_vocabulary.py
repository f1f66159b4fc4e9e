"""Write a compact vocabulary file (tokenizer.vocab) from a tiktoken rank file.

    python scripts/make_vocabulary.py gpt2.tiktoken crucible/data/gpt2.vocab

The default checks that the ranks are those of GPT-2 (tiktoken's r50k_base) and adds <|endoftext|> = 50256. For other
rank files give --pattern, --special TEXT=ID (repeatable) and --sha256 (or --sha256 any).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path

from crucible.vocabulary import Vocabulary

GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=Path)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("--pattern", default="gpt2")
    parser.add_argument("--special", action="append", metavar="TEXT=ID")
    parser.add_argument("--sha256", default=GPT2_SHA256)
    args = parser.parse_args()
    data = args.ranks.read_bytes()
    if args.sha256 not in ("any", digest := hashlib.sha256(data).hexdigest()):
        print(f"{args.ranks}: sha256 is {digest}, not {args.sha256}", file=sys.stderr)
        return 2
    pairs = [entry.rpartition("=") for entry in args.special or ["<|endoftext|>=50256"]]
    vocabulary = Vocabulary.from_tiktoken(data, args.pattern, {text: int(token_id) for text, _, token_id in pairs})
    temporary = args.vocabulary.with_name(args.vocabulary.name + ".tmp")
    temporary.write_bytes(vocabulary.to_bytes())
    os.replace(temporary, args.vocabulary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
