"""Adapters: cuda."""
