"""When times of one version count for another: major and minor agree, patches and builds don't matter."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from packaging.version import InvalidVersion, Version

__all__ = ["differing", "same_release"]


@functools.cache
def same_release(one: str, other: str) -> bool:
    """Equal in major and minor; text that is no version, only in whole."""
    try:
        mine, theirs = ((*Version(text).release, 0)[:2] for text in (one, other))
        return mine == theirs
    except InvalidVersion:
        return one == other


def differing(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Distribution -> (old, new), of those that both name and that aren't the same release."""
    shared = (name for name in old if name in new)
    return {name: (old[name], new[name]) for name in shared if not same_release(old[name], new[name])}
