"""anyattn on the Lumen accelerators. Importing this imports nothing: anyattn reads `records` first."""
