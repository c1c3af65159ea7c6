"""Adapters: ascend."""
