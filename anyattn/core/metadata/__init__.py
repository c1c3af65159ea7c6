"""The metadata compiler: one pass a step and table group."""
