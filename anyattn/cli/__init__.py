"""The `anyattn` command. Nothing here imports torch before a command asks for it."""
