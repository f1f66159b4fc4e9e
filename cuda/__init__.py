"""CUDA sources, read as package data and compiled at run time for the GPU at hand."""
