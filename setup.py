"""The compiled modules; everything else is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

# -ffp-contract=off: GCC fuses multiply-add by default and Numba does not; where bits matter, code asks for fma.
OPTIONS = {
    "include_dirs": [numpy.get_include(), "cuda", "native"],
    "define_macros": [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
    "extra_compile_args": ["-O3", "-ffp-contract=off"],
    "depends": [str(header) for folder in ("cuda", "native") for header in sorted(Path(folder).glob("*.h"))],
}

setup(
    ext_modules=cythonize(
        [
            Extension(f"crucible.native.{path.stem}", [str(path)], **OPTIONS)
            for path in sorted(Path("native").glob("*.pyx"))
        ],
        build_dir="build/cython",
        compiler_directives={"language_level": "3", "boundscheck": False, "wraparound": False},
    )
)
