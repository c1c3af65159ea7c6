"""Triton kernels; importing this package needs Triton."""
