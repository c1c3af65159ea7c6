"""Shipped measurement tables."""
