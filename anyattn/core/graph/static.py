"""What runners of captured segments need: static inputs, outputs cut to real rows, a guard of the pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from anyattn.core.capturing import is_capturing
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.errors import GraphError, PoolError

__all__ = ["PoolGuard", "copy_in", "cut"]


class PoolGuard:
    """Remembers the pools that graphs read, those of a wrapper's children too, and refuses what would read
    another memory.
    """

    def __init__(self, backend: Any) -> None:
        self._device: torch.device = backend.pool.device
        self._pools = tuple((each, each.pool) for each in _with_children(backend))
        self._storage = tuple((p, _storage_address(p)) for p in {id(p): p for _, p in self._pools}.values())

    def check_idle(self, what: str) -> None:
        """Raises `GraphError` while a graph is captured: the outer graph would record the preparation."""
        if is_capturing(self._device):
            raise GraphError(
                f"{what} inside another capture",
                asked=f"a {what} while a graph is captured",
                allowed="captures and replays one after another",
                hint=f"{what} before or after the other capture",
            )

    def check_pool(self) -> None:
        """Raises `GraphError` where the KV that the graphs read is no longer the backend's."""
        for backend, pool in self._pools:
            if backend.pool is not pool:
                break
        else:
            for pool, was in self._storage:
                if _storage_address(pool) != was:
                    break
            else:
                return
        raise GraphError(
            "the KV pool was replaced, or its storage moved, after the capture",
            asked="a replay that would read the old memory",
            allowed="the pool that was captured with",
            hint="make a new GraphRunner, and capture again",
        )


def _with_children(backend: Any) -> Iterator[Any]:
    """The backend and all below it that have a pool."""
    if hasattr(backend, "pool"):
        yield backend
    for child in getattr(backend, "children", ()):
        yield from _with_children(child)


def _storage_address(pool: Any) -> int:
    """Where the first layer's storage begins; 0 for pools whose storage nobody else may address."""
    if isinstance(pool, MHAPool):
        return pool.key_cache(0).data_ptr()  # views of it cost more than all the rest of the guard
    try:
        return int(pool.caches(0)[0].data_ptr())
    except PoolError:
        return 0


def copy_in(static: torch.Tensor, value: torch.Tensor) -> None:
    """A step's `value [T, …]` at the beginning of its buffer, zeros behind it."""
    rows = value.shape[0]
    static[:rows].copy_(value, non_blocking=True)
    if rows < static.shape[0]:
        static[rows:].zero_()


def cut(outputs: Any, tokens: int, padded: int) -> Any:
    """The rows of real tokens, in the structure that the body returned."""
    if tokens == padded:
        return outputs
    if isinstance(outputs, torch.Tensor):
        return outputs[:tokens]
    if isinstance(outputs, Mapping):
        return {name: cut(value, tokens, padded) for name, value in outputs.items()}
    if isinstance(outputs, (tuple, list)):
        return tuple(cut(value, tokens, padded) for value in outputs)
    return outputs
