"""Adapters: sparse."""
