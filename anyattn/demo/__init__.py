"""A small real language model on the package."""
