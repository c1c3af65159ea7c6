"""The host side of the fused metadata kernel: a filler for `MetadataCompiler`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from anyattn.core.groups import Space, TableGroup
from anyattn.core.kv.request_table import RequestTable
from anyattn.core.metadata.compiler import MetadataCompiler
from anyattn.core.plan import Plan, Table, TableForm, TableKind
from anyattn.kernels.triton.decode_launch import (
    RANGES_CONSTEXPRS,
    DecodeStep,
    fill_ranges,
    ranges_constants,
)
from anyattn.kernels.triton.launch import Started, direct_device, launch
from anyattn.kernels.triton.metadata import BLOCK_TABLE, CSR, NO_TABLE, SLOTS, metadata_kernel
from anyattn.kernels.triton.pull_launch import Puller

__all__ = ["NO_WINDOW", "FusedFiller", "compile_by_kernels"]

NO_WINDOW = 1 << 30
"""A window that trims nothing: no request is that long, and `prefix - window` stays in int32."""

_KINDS = {
    TableKind.TOKEN_CSR: CSR,
    TableKind.PAGE_CSR: CSR,
    TableKind.BLOCK_TABLE: BLOCK_TABLE,
    TableKind.REQUEST_TABLE: NO_TABLE,
}
_ANY_LENGTH = 1 << 62
_NO_FORM = TableForm(TableKind.REQUEST_TABLE)
_NO_GROUP: tuple[tuple[Any, ...], tuple[int, int]] = ((None,) * 5, (NO_WINDOW, 0))

_TENSORS = 9 + 5 * SLOTS + 1
"""Arguments before the numbers: the step's, those of each group, and ranges."""

_DEAL_CONSTEXPRS = tuple("DEAL_B" if name == "BLOCK_B" else name for name in RANGES_CONSTEXPRS)
_NO_DEAL = (0,) * len(RANGES_CONSTEXPRS)

_Groups = Sequence[tuple[TableGroup, Table]]


class _Again(NamedTuple):
    """The one launch that fills a plan's tables, whatever the values in its vectors are."""

    device: int
    source: torch.Tensor
    place: int
    run: Callable[..., None]
    grid: tuple[int, int, int]
    values: tuple[Any, ...]
    """All that follows the stream."""
    others: tuple[DecodeStep, ...]
    reach: int
    """The longest request that the grid was made for, with room: any grid is right, a small one is slow."""


class FusedFiller:
    """`MetadataCompiler.filler` in one launch for up to `SLOTS` table groups, one more per `SLOTS` beyond.

    Same results as the compiler's own `fill`, bit for bit. The grid depends on shapes and host bounds
    alone; nothing is allocated or copied, so a graph may record it.
    """

    def __init__(
        self,
        table: RequestTable,
        dealt: Callable[[Plan], Iterable[DecodeStep]] | None = None,
        *,
        chunk: int = 1024,
        block_b: int = 1024,
        programs: int = 1024,
    ) -> None:
        """Args: `chunk` entries a program writes at a time, `block_b` lengths it sums at a time (powers of
        two), `programs`: long rows are split until a job has about this many. `dealt`: a plan's decode
        steps, which are dealt out as well, the first of them in the same launch.
        """
        self.table, self._dealt = table, dealt
        self._chunk, self._block_b, self._programs = chunk, block_b, programs
        self._started: dict[tuple[Any, ...], Started] = {}

    def __call__(self, plan: Plan) -> None:  # anyattn: in-graph
        """Fill offsets, positions and every table of `plan`."""
        again: _Again | None = plan.refill
        if again is not None:
            device, was, place, run, grid, values, others, reach = again
            source = self.table.req_to_token
            same = direct_device() == device and was is source and place == source.data_ptr()
            if same and plan.max_kv_len <= reach:
                run(*grid, torch._C._cuda_getCurrentRawStream(device), *values)
                for step in others:
                    fill_ranges(step)
                return
        steps = () if self._dealt is None else tuple(self._dealt(plan))
        own = next((s for s in steps if s.source is self.table.req_to_token), None)
        others = tuple(s for s in steps if s is not own)
        groups = tuple(plan.tables.items())
        for first in range(0, max(1, len(groups)), SLOTS):
            with_step = first == 0
            self._launch(plan, groups[first : first + SLOTS], own if with_step else None, others, with_step)
        for step in others:
            fill_ranges(step)

    def _launch(
        self,
        plan: Plan,
        groups: _Groups,
        step: DecodeStep | None,
        others: tuple[DecodeStep, ...],
        with_step: bool,
    ) -> None:
        batch, num_tokens = plan.key.num_requests, plan.key.num_tokens
        if batch == 0:
            return
        form = groups[0][1].form if groups else _NO_FORM
        slots = [_slot(group, table) for group, table in groups]
        slots += [_NO_GROUP] * (SLOTS - len(slots))
        splits = self._splits(plan, groups)
        positions = plan.positions if plan.batch.positions is None else None
        own = (plan.prefix_lens, plan.query_offsets, positions) if with_step else (None, None, None)
        source, encoder = self.table.req_to_token, self.table.encoder_to_token
        uses_encoder = sum((group.space is Space.ENCODER) << i for i, (group, _) in enumerate(groups))
        ranges, dealing, wide = None, (0, 0), batch * splits
        if step is not None:
            ranges, dealing = step.ranges, (step.tiles.num_ranges, step.window or 0)
            wide = max(wide, dealing[0])
        deal = _NO_DEAL if step is None else ranges_constants(step)
        grid = wide, 1 + len(groups) + (step is not None)
        args = (
            plan.req_pool_indices, plan.seq_lens, plan.extend_lens,
            plan.encoder_lens if uses_encoder else None, source, encoder if uses_encoder else None, *own,
            *(tensor for tensors, _ in slots for tensor in tensors), ranges,
            *_shape(source), *_shape(encoder), batch, num_tokens, splits,
            *(number for _, numbers in slots for number in numbers), *dealing,
        )  # fmt: skip
        device = direct_device()
        key: tuple[Any, ...] = ()
        if device >= 0:
            # Numbers aren't specialised on, and what is None follows from the key.
            key = (device, form, len(groups), uses_encoder, with_step, positions is None, step is None, deal)
            started = self._started.get(key)
            values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
            if started is not None and not _odd(values[:_TENSORS]):
                stream = torch._C._cuda_getCurrentRawStream(device)
                started.start_rows(stream, *grid, *values)
                if not uses_encoder and len(groups) == len(plan.tables) and plan.max_q_len == 1:
                    after = (*started.front, *values, *started.last)
                    reach = _reach(plan)
                    plan.refill = _Again(
                        device, source, values[4], started.run, (*grid, 1), after, others, reach
                    )
                return
        constexprs = {
            "GROUPS": len(groups),
            "ENCODER": uses_encoder,
            "KIND": _KINDS[form.kind],
            "PAGE": form.kernel_page,
            "FILL": form.fill,
            "CHUNK": self._chunk,
            "BLOCK_B": self._block_b,
            **dict(zip(_DEAL_CONSTEXPRS, deal, strict=True)),
        }
        compiled = launch(
            metadata_kernel,
            grid,
            args,
            constexprs,
            num_warps=4,
            num_stages=1,
        )
        if compiled is not None and not _odd(values[:_TENSORS]):
            self._started[key] = Started(compiled, tuple(constexprs.values()))

    def _splits(self, plan: Plan, groups: _Groups) -> int:
        """Programs a request: as many as its longest row can use, while the grid is small."""
        longest = max([plan.max_q_len, *(_longest_row(plan, *group) for group in groups)])
        most = max(1, self._programs // plan.key.num_requests)
        return min(most, max(1, -(-longest // self._chunk)))


def compile_by_kernels(
    compiler: MetadataCompiler,
    table: RequestTable,
    dealt: Callable[[Plan], Iterable[DecodeStep]] | None = None,
) -> None:
    """From now on kernels upload and fill what `compiler` compiles; `dealt`: see `FusedFiller`."""
    compiler.filler, compiler.uploader.pull = FusedFiller(table, dealt), Puller()


def _reach(plan: Plan) -> int:
    """Lengths for which the grid of a decode step is made: that of flat lists depends on their bound."""
    flat = any(table.indices is not None for table in plan.tables.values())
    return 2 * plan.max_kv_len if flat else _ANY_LENGTH


def _odd(places: Sequence[int | None]) -> int:
    """Not zero if some tensor doesn't begin at a multiple of 16 bytes: that needs a kernel of its own."""
    bits = 0
    for place in places:
        bits |= place or 0
    return bits & 15


def _shape(source: torch.Tensor | None) -> tuple[int, int]:
    """Row stride and columns of a request table."""
    return (0, 1) if source is None else (source.stride(0), source.shape[1])


def _slot(group: TableGroup, table: Table) -> tuple[tuple[Any, ...], tuple[int, int]]:
    """Tensors and numbers of one group, in the kernel's order."""
    out = table.block_table if table.block_table is not None else table.indices
    window = NO_WINDOW if group.window is None else min(group.window, NO_WINDOW)
    size = 0 if out is None else out.shape[-1]
    return (table.kv_start, table.kv_lens, table.indptr, table.last_page_len, out), (window, size)


def _longest_row(plan: Plan, group: TableGroup, table: Table) -> int:
    """Entries that one request may have: a bound for the grid, no more."""
    if table.block_table is not None:
        return table.block_table.shape[1]
    if table.indices is None:
        return 0
    if group.space is Space.ENCODER:
        return -(-table.indices.shape[0] // plan.key.num_requests)
    return min(table.indices.shape[0], -(-plan.max_kv_len // table.form.kernel_page))
