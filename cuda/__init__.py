"""CUDA sources, installed as the package crucible.cuda; compiled at run time for the GPU at hand."""

# Run from the repository's root, Python takes this directory for the top-level package `cuda`, in which NVIDIA's
# cuda.bindings and cuda.pathfinder live: let it find them too.
from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
