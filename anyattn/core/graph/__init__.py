"""Capture and replay."""
