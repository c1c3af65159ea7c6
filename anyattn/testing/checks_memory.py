"""Offsets past 2**31: a pool whose K alone has more elements than an int32 counts, read at its far end."""

from __future__ import annotations

import os

import torch

import anyattn
from anyattn.core.dtypes import torch_dtype
from anyattn.testing import oracle
from anyattn.testing.cases import Case
from anyattn.testing.checks import Outcome, Skip, Subject
from anyattn.testing.selecting import select_for

__all__ = ["offsets"]

_PAST = 1 << 31
_GIB = 1 << 30


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def offsets(subject: Subject, case: Case) -> Outcome:
    """An extend and a decode of one request whose slots lie past 2**31 elements. Case: one request."""
    device, dtype = torch.device(subject.device), torch_dtype(case.kv_dtype)
    slot = case.num_kv_heads * max(case.head_dim, case.v_head_dim)
    slots = -(-(_PAST // slot + 4096) // case.page_size) * case.page_size
    needed = int(slots * case.num_kv_heads * (case.head_dim + case.v_head_dim) * dtype.itemsize * 1.1)
    free = _free_bytes(device)
    if free < needed:
        raise Skip(f"needs {needed / _GIB:.1f} GiB of free memory, {free / _GIB:.1f} GiB are there")
    total = case.seq_lens[0] + 1
    spec = case.spec()
    decision = select_for(
        [spec], dtype=case.dtype, kv_dtype=case.kv_dtype, device=subject.device, host=subject.host,
        page_size=case.page_size, layout=case.layout, backend=subject.declared.name,
    )  # fmt: skip
    pool = anyattn.kv.create_pool(decision, num_slots=slots)
    table = anyattn.kv.RequestTable(max_requests=2, max_context=total + 1, device=device)
    backend = anyattn.create_backend(decision, pool, table)
    layer = anyattn.AttentionLayer(spec, 0)
    first_slot = pool.total_slots - -(-total // case.page_size) * case.page_size  # pages begin at multiples
    own = torch.arange(first_slot, first_slot + total)
    table.req_to_token[0, :total] = own.to(device, torch.int32)
    generator = torch.Generator().manual_seed(case.seed)
    q, k, v = (
        torch.randn(total, heads, size, generator=generator).to(torch_dtype(case.dtype))
        for heads, size in (
            (case.num_q_heads, case.head_dim),
            (case.num_kv_heads, case.head_dim),
            (case.num_kv_heads, case.v_head_dim),
        )
    )
    error = 0.0
    for first, last in ((0, total - 1), (total - 1, total)):
        loc = own[first:last].tolist()
        batch = (
            anyattn.ForwardBatch.extend([0], [first], [last - first], loc)
            if first == 0
            else anyattn.ForwardBatch.decode([0], [last], loc)
        )
        plan = backend.init_forward_metadata(batch)
        with anyattn.forward_context(backend, plan):
            out = layer(*(x[first:last].to(device) for x in (q, k, v)), batch)
        request = oracle.OracleRequest(slots=range(last), num_queries=last - first)
        want, _ = oracle.attend(q[first:last], k, v, [request], scale=spec.scale)
        error = max(error, oracle.relative_error(out, want))
    return Outcome(error, case.tolerance())
