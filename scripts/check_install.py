"""Is the installed package complete? Run by an interpreter that has it installed, outside the source tree.

Checks what a wheel forgets most easily: compiled modules, package data, CUDA sources, entry points.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

COMPILED = ("batch", "bpe", "pages", "sampling")
DATA = {
    "crucible": ["py.typed"],
    "crucible.cuda": ["order_key.h", "common.cuh", "linear_small.cu"],
    "crucible.data": [
        "LICENSE.gpt2",
        "gpt2.vocab",
        "LICENSE.quickstart",
        "quickstart.txt.xz",
        "model/config.json",
        "model/model.safetensors",
        "model/tokenizer.vocab",
    ],
    "crucible.native": [f"{name}.pyi" for name in COMPILED],
}


def main() -> int:
    import crucible

    location = Path(crucible.__file__).resolve().parent
    if Path.cwd() in location.parents and "site-packages" not in location.parts:
        sys.exit(f"crucible comes from the source tree ({location}), not from an installation")
    missing = [f"crucible.native.{name}" for name in COMPILED if not importable(f"crucible.native.{name}")]
    missing += [name for name in ("crucible.llm", "crucible.server.cli", "crucible_train.cli") if not importable(name)]
    missing += [
        f"{package}/{name}"
        for package, names in DATA.items()
        for name in names
        if not resources.files(package).joinpath(name).is_file()
    ]
    if missing:
        sys.exit(f"the installation lacks: {', '.join(missing)}")
    if metadata.version("crucible-lm") != crucible.__version__:
        sys.exit("crucible.__version__ differs from the package's version")
    scripts = Path(sys.executable).parent
    ids = subprocess.run(
        [scripts / "crucible", "tokenize", "The World is a stage"], capture_output=True, text=True, check=True
    )
    if ids.stdout.strip() != "[464, 2159, 318, 257, 3800]":
        sys.exit(f"crucible tokenize printed {ids.stdout!r}")
    subprocess.run([scripts / "crucible-serve", "--help"], stdout=subprocess.DEVNULL, check=True)
    print(f"crucible {crucible.__version__} at {location}: complete")
    return 0


def importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
