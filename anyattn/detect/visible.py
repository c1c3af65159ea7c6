"""The rules of `CUDA_VISIBLE_DEVICES` and its relatives.

Sources: CUDA programming guide, appendix on environment variables (order, prefixes of UUIDs, the list
ends at the first invalid entry); torch.cuda (a repeated device leaves none); ROCm's page on isolation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = ["choose", "first_set"]

_NUMBER = re.compile(r"\s*[+-]?\d+")


def first_set(environ: Mapping[str, str], *names: str) -> tuple[str, str] | None:
    """(name, value) of the first of `names` that is set, empty values included."""
    return next(((name, environ[name]) for name in names if name in environ), None)


def choose(text: str, indexed: Sequence[int], named: Sequence[tuple[str, int]] = ()) -> list[int]:
    """The positions of the devices that `text` makes visible, in its order.

    `indexed[i]` is the position of device number i, `named` pairs UUIDs with positions; a unique prefix
    of a UUID will do. The list ends at the first entry that names nothing, so an empty string and `-1`
    mean none.
    """
    chosen: list[int] = []
    for entry in text.split(","):
        position = _by_name(entry.strip().lower(), named)
        if position is None:
            position = _by_number(entry, indexed)
        if position is None:
            break
        if position in chosen:
            return []
        chosen.append(position)
    return chosen


def _by_name(entry: str, named: Sequence[tuple[str, int]]) -> int | None:
    if not entry.startswith(("gpu-", "mig-")):
        return None
    matches = [(name.lower(), position) for name, position in named if name.lower().startswith(entry)]
    exact = [position for name, position in matches if name == entry]
    if exact or len(matches) == 1:
        return exact[0] if exact else matches[0][1]
    return None


def _by_number(entry: str, indexed: Sequence[int]) -> int | None:
    number = _NUMBER.match(entry)  # like strtol, trailing text is ignored
    if number is None or not 0 <= int(number.group()) < len(indexed):
        return None
    return indexed[int(number.group())]
