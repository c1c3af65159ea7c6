"""Tests of kernels in Triton's interpreter; `tests/kernels/test_interpreter.py` runs them.

Triton reads TRITON_INTERPRET when a kernel is decorated, and an interpreted kernel can't be compiled, so
these files are collected only in a process that has the variable set from its start:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreter
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]

if not collect_ignore_glob:
    from anyattn.testing.interpreter_costs import spare_interpreter

    spare_interpreter()
