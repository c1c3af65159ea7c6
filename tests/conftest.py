"""Shared by all tests: full run-time checks, one thread per process."""

import os

os.environ.setdefault("ANYATTN_CHECKS", "full")
