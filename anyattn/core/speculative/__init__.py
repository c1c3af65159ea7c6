"""Speculative decoding: trees, verify masks, drafts."""
