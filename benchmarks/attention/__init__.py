"""Attention kernels against their peers' own APIs: `python -m benchmarks.attention.decode`, `….extend`."""
