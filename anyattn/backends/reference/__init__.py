"""Adapters: reference."""
