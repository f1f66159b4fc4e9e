"""Defaults that more than one part must agree on."""

CPU_CONTEXT = 2048
"""The default context on a CPU is the model's, at most this: a KV pool is reserved for it."""
