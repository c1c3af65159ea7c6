"""Measurements. Run one with `python -m benchmarks.<name>` from the repository's root."""
