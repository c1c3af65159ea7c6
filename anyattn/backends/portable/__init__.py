"""Adapters: portable."""
