"""Per-platform preferences, graph objects and streams."""
