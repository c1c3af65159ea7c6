"""Adapters: intel."""
