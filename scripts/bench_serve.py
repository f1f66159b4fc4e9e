#!/usr/bin/env python3
"""Load on a running server: python scripts/bench_serve.py --url URL […]. The same as ``crucible bench serve``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from crucible.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "serve", *sys.argv[1:]]))
