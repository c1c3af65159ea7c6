"""Shared by all tests: full run-time checks, one thread per process."""

import os

os.environ.setdefault("ANYATTN_CHECKS", "full")
# Threads of several test processes on few cores wait for each other; one thread each doesn't.
os.environ.setdefault("OMP_NUM_THREADS", "1")
