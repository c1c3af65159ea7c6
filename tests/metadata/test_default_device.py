"""What is kept on the host stays there where torch makes new tensors on another device by default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch

import anyattn
from anyattn.core.batch import ForwardBatch
from anyattn.core.contract import AttentionBackend
from anyattn.testing.emulators import emulating
from anyattn.testing.selecting import select_for

PAGE, ROWS, CONTEXT = 4, 4, 32


@contextmanager
def _there(name: str) -> Iterator[None]:
    with nullcontext() if name == "torch_native" else emulating(name):
        yield


def _backend(name: str, specs: Sequence[anyattn.AttentionSpec]) -> AttentionBackend:
    host = {} if name == "torch_native" else {"host": "cuda:sm90"}
    decision = select_for(
        list(specs), device="cpu", dtype=torch.bfloat16, backend=name, page_size=PAGE,
        limits=anyattn.Limits(ROWS, 64, CONTEXT), **host,
    )  # fmt: skip
    pool = anyattn.kv.create_pool(decision, num_slots=ROWS * CONTEXT)
    table = anyattn.kv.RequestTable(max_requests=ROWS, max_context=CONTEXT)
    slots = torch.arange(ROWS * CONTEXT, dtype=torch.int32, device="cpu") + PAGE
    table.req_to_token[:ROWS] = slots.view(ROWS, CONTEXT)
    backend = anyattn.create_backend(decision, pool, table)
    assert isinstance(backend, AttentionBackend)
    return backend


def _steps(backend: AttentionBackend) -> list[list[list[int]]]:
    """Decode steps, one of them of the same shape as that before, and extends; what their plans hold."""
    slot = backend.table.req_to_token.tolist()
    batches = [ForwardBatch.decode([0, 1], [n, n + 3], [slot[0][n - 1], slot[1][n + 2]]) for n in (5, 6)]
    batches.append(ForwardBatch.extend([2, 3], [0, 0], [2, 1], [*slot[2][:2], slot[3][0]]))
    batches.append(ForwardBatch.extend([2], [2], [1], [slot[2][2]]))
    found = []
    for batch in batches:
        plan = backend.init_forward_metadata(batch)
        table = next(iter(plan.tables.values()), None)
        host = None if table is None else table.host
        vectors = [plan.seq_lens, plan.positions, plan.query_offsets, plan.req_pool_indices]
        found.append([x.tolist() for x in (*vectors, *(() if host is None else (host.indptr,)))])
        del plan, table, host
    return found


def _elsewhere(yes: bool) -> AbstractContextManager[object]:
    return torch.device("meta") if yes else nullcontext()


@pytest.mark.parametrize(
    ("name", "made", "used"),
    [
        *(("torch_native", *where) for where in ((True, False), (False, True), (True, True))),
        *(("fa3", *where) for where in ((True, False), (False, True), (True, True))),
        ("flashinfer", True, False),  # its stand-in's own planning takes the default device
    ],
)
def test_another_default_device_changes_nothing(name: str, made: bool, used: bool) -> None:
    specs = [anyattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)]
    with _there(name):
        want = _steps(_backend(name, specs))
        with _elsewhere(made):
            backend = _backend(name, specs)
        with _elsewhere(used):
            found = _steps(backend)
    assert found == want


def test_batches_and_masks_are_made_on_the_host() -> None:
    with torch.device("meta"):
        idle = ForwardBatch.idle()
        batch = ForwardBatch.extend([1], [0], [0], [])
        mask = anyattn.ExplicitMask.from_matrices([torch.ones(1, 2, dtype=torch.bool, device="cpu")])
    made = (idle.seq_lens, batch.out_cache_loc, mask.indptr, mask.cells)
    assert all(x is not None and x.is_cpu for x in made)
