"""Adapters: linear."""
