"""The `anyattn` command."""
