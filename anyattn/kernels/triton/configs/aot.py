"""The kernel configurations that `anyattn verify-compile` compiles for every chip: at most 54.

An entry is a name and a function that calls a host function of this package with meta tensors. To add one,
write that function (or reuse one with `partial`) and list it in `ENTRIES`. Attention's are in
`aot_attention.py` and `aot_verify.py`; `aot_full.py` has every head size, for use on demand.
"""

from __future__ import annotations

from functools import partial

import torch

from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.groups import Space, TableGroup
from anyattn.core.kv.request_table import RequestTable
from anyattn.core.metadata.upload import UploadLayout
from anyattn.core.plan import Plan, PlanKey, Table, TableForm, TableKind
from anyattn.kernels.triton.aot import Entry, Target
from anyattn.kernels.triton.attention import Heads
from anyattn.kernels.triton.configs import Decode, aot_attention, aot_verify
from anyattn.kernels.triton.decode_launch import DecodeStep
from anyattn.kernels.triton.metadata_launch import FusedFiller
from anyattn.kernels.triton.pull_launch import first_launch

__all__ = ["ENTRIES", "MAX_ENTRIES"]

MAX_ENTRIES = 54

_FULL, _WINDOW = TableGroup(), TableGroup(window=1024)
_ENCODER = TableGroup(Space.ENCODER)


def _int32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def _int64(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _table(form: TableForm, batch: int, context: int) -> Table:
    """Storage of one table as the compiler allocates it without exact lengths."""
    table = Table(form, _int32(batch), _int32(batch))
    pages = context // form.kernel_page
    if form.kind is TableKind.BLOCK_TABLE:
        table.block_table = torch.empty(batch, pages, dtype=form.index_dtype, device="meta")
    elif form.kind is not TableKind.REQUEST_TABLE:
        table.indptr, table.last_page_len = _int32(batch + 1), _int32(batch)
        table.indices = torch.empty(batch * pages + form.index_slack, dtype=form.index_dtype, device="meta")
    return table


def metadata(
    form: TableForm, groups: tuple[TableGroup, ...], target: Target, tiles: Decode | None = None
) -> None:
    """The fused metadata kernel on a decode step of 64 requests, contexts up to 32k, dealt out in `tiles`."""
    batch, context = 64, 32768
    table = RequestTable(max_requests=256, max_context=context, device="meta", max_encoder=2048)
    step = ForwardBatch.decode([0] * batch, [1] * batch, [0] * batch)
    plan = Plan(
        key=PlanKey(step.serial, 0, ForwardMode.DECODE, batch, batch),
        batch=step,
        req_pool_indices=_int64(batch),
        seq_lens=_int32(batch),
        prefix_lens=_int32(batch),
        extend_lens=_int32(batch),
        query_offsets=_int32(batch + 1),
        positions=_int64(batch),
        write_locs={},
        max_q_len=1,
        max_kv_len=context,
        tables={group: _table(form, batch, context) for group in groups},
        encoder_lens=_int32(batch),
    )
    steps = []
    if tiles is not None:
        for group, each in plan.tables.items():
            steps.append(
                DecodeStep.of(
                    table.req_to_token,
                    plan.req_pool_indices,
                    each.kv_start,
                    each.kv_lens,
                    group.window,
                    form.kernel_page,
                    Heads(32, 8, 128, 128),
                    tiles,
                )
            )
    FusedFiller(table, lambda plan: steps[-1:])(plan)


def pulled(target: Target) -> None:
    """The upload of a decode step of 64 requests, which the device reads by itself."""
    vectors = [("rows", 0, 64, torch.int64), ("seq", 512, 64, torch.int32), ("new", 768, 64, torch.int32)]
    region = torch.empty(1536, dtype=torch.uint8, device="meta")
    first_launch(UploadLayout(region, [*vectors, ("loc", 1024, 64, torch.int64)]), region)


_METADATA = (
    Entry("metadata/upload", pulled),
    Entry(
        "metadata/token-csr",
        partial(metadata, TableForm(TableKind.TOKEN_CSR), (_FULL,)),
    ),
    Entry(
        "metadata/page-csr-16-two-groups",
        partial(metadata, TableForm(TableKind.PAGE_CSR, kernel_page=16, index_slack=1), (_FULL, _WINDOW)),
    ),
    Entry(
        "metadata/block-table-64-three-groups",
        partial(metadata, TableForm(TableKind.BLOCK_TABLE, kernel_page=64), (_FULL, _WINDOW, _ENCODER)),
    ),
    Entry(
        "metadata/request-table",
        partial(
            metadata,
            TableForm(TableKind.REQUEST_TABLE, kernel_page=16),
            (_FULL, _WINDOW),
            tiles=Decode(128, 4, 2, 264, min_tiles=2),
        ),
    ),
)

ENTRIES: tuple[Entry, ...] = (*_METADATA, *aot_attention.ENTRIES, *aot_verify.ENTRIES)
"""What is compiled, in the table's order."""
