"""The guard of pools looks below wrappers: a child reads its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anyattn.core.graph.static import PoolGuard
from anyattn.errors import GraphError


def pool() -> Any:
    memory = torch.zeros(4)
    return SimpleNamespace(device=torch.device("cpu"), caches=lambda layer: (memory,))


def test_a_pool_replaced_in_a_child_is_noticed() -> None:
    shared = pool()
    children = [SimpleNamespace(pool=shared), SimpleNamespace(pool=shared)]
    guard = PoolGuard(SimpleNamespace(pool=shared, children=children))
    guard.check_pool()
    children[1].pool = pool()
    with pytest.raises(GraphError, match="pool was replaced"):
        guard.check_pool()
    children[1].pool = shared
    guard.check_pool()


def test_storage_that_moved_is_noticed() -> None:
    own = pool()
    guard = PoolGuard(SimpleNamespace(pool=own))
    own.caches = pool().caches
    with pytest.raises(GraphError, match="storage moved"):
        guard.check_pool()
