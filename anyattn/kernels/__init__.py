"""Portable kernels."""
