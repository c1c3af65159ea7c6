"""A worker of the kit: items on stdin, results on stdout. Started by `anyattn.testing.pool`.

python -m anyattn.testing.worker BACKEND DEVICE [EMULATED_HOST]
"""

from __future__ import annotations

import os
import sys

from anyattn.testing.checks import Subject
from anyattn.testing.kit import explained_result, run_item
from anyattn.testing.pool import answer, decode_item, poisoned
from anyattn.testing.subject import open_subject

__all__ = ["main"]

_EXPLAINED = 2  # failures that one worker takes apart


def main(backend: str, device: str, host: str | None = None) -> None:
    """Serve until stdin ends, or until the device is poisoned: then the next worker is a fresh one."""
    stdout, sys.stdout = sys.stdout, sys.stderr
    subject: Subject = open_subject(backend, device, emulated=host is not None, host=host)
    explained = 0
    for line in sys.stdin:
        result = run_item(decode_item(line), subject)
        ends = poisoned(result)
        if result.why is not None and not ends and explained < _EXPLAINED:
            explained += 1
            result = explained_result(result, subject)
        answer(result, stdout)
        if ends:
            os._exit(3)  # destructors of a poisoned context hang or abort


if __name__ == "__main__":
    main(*sys.argv[1:])
