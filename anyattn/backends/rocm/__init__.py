"""Adapters: rocm."""
