"""Benchmarks: ``crucible bench``. They know the engine, or a server's HTTP routes, and nothing of each other's modes.

A mode returns a Report (crucible.bench.report); what it measured is summarised by crucible.bench.statistics.
"""
