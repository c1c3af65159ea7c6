"""Every table of a step in one launch, equal bit for bit to `core.metadata.tables`.

A program serves one request and one job: job 0 is the step's own vectors, job g + 1 is table group g. A last
job may deal out a decode step, a range a program (`ranges.py`). A program
computes where its request starts from the lengths themselves (a masked sum over the batch, B reads from
cache), so no program waits for another and no launch waits for the host.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (inside a kernel, annotations mean constexpr to Triton)
# ruff: noqa: SIM102, RET505  (an `if` on a constexpr is decided by the compiler: not to be joined or undone)
from __future__ import annotations

import triton
import triton.language as tl

from anyattn.kernels.triton.ranges import deal

__all__ = ["BLOCK_TABLE", "CSR", "NO_TABLE", "SLOTS", "metadata_kernel"]

SLOTS = 4
"""Table groups that one launch can serve."""

NO_TABLE, CSR, BLOCK_TABLE = 0, 1, 2
"""Values of KIND."""

# Sizes that change from step to step: a kernel compiled per divisibility of a length would be compiled
# in the middle of serving.
_VARYING = (
    "source_row", "source_columns", "encoder_row", "encoder_columns", "batch", "num_tokens", "splits",
    "num_ranges", "window",
    *(f"{name}{slot}" for slot in range(SLOTS) for name in ("window", "size")),
)  # fmt: skip


@triton.jit
def _extent(seq_len, prefix, window, PAGE: tl.constexpr):
    """First listed position (at a page's begin) and number of entries."""
    start = tl.maximum(prefix - (window - 1), 0)
    start -= start % PAGE
    return start, (seq_len - start + (PAGE - 1)) // PAGE


@triton.jit
def _prefix_of(seq_len, extend_lens, i, live):
    """Where the new tokens of requests `i` start; an encoder's keys count as cached (`extend_lens` None)."""
    if extend_lens is None:
        return seq_len
    else:
        return seq_len - tl.load(extend_lens + i, mask=live, other=0)


@triton.jit
def _tokens_before(extend_lens, b, batch, BLOCK_B: tl.constexpr):
    """Query tokens of the requests before `b`, and of all."""
    before = tl.zeros([], tl.int32)
    total = tl.zeros([], tl.int32)
    for first in range(0, batch, BLOCK_B):
        i = first + tl.arange(0, BLOCK_B)
        counts = tl.load(extend_lens + i, mask=i < batch, other=0)
        before += tl.sum(tl.where(i < b, counts, 0), 0)
        total += tl.sum(counts, 0)
    return before, total


@triton.jit
def _entries_before(seq_lens, extend_lens, window, b, batch, PAGE: tl.constexpr, BLOCK_B: tl.constexpr):
    """Table entries of the requests before `b`, and of all."""
    before = tl.zeros([], tl.int32)
    total = tl.zeros([], tl.int32)
    for first in range(0, batch, BLOCK_B):
        i = first + tl.arange(0, BLOCK_B)
        seq_len = tl.load(seq_lens + i, mask=i < batch, other=0)
        _, counts = _extent(seq_len, _prefix_of(seq_len, extend_lens, i, i < batch), window, PAGE)
        before += tl.sum(tl.where(i < b, counts, 0), 0)
        total += tl.sum(counts, 0)
    return before, total


@triton.jit
def _fill_tail(out, total, size, value, programs, CHUNK: tl.constexpr):
    """`value` from `total` to `size`, dealt over all programs of the job."""
    first = total.to(tl.int64) + tl.program_id(0).to(tl.int64) * CHUNK
    for begin in range(first, size, programs * CHUNK):
        at = begin + tl.arange(0, CHUNK)
        tl.store(out + at, tl.full([CHUNK], value, out.dtype.element_ty), mask=at < size)


@triton.jit
def _step(
    seq_lens, extend_lens, prefix_lens, query_offsets, positions, b, part, batch, num_tokens, splits,
    CHUNK: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Job 0: prefix lengths, query offsets, positions (unless the caller gave them)."""
    extend = tl.load(extend_lens + b)
    prefix = tl.load(seq_lens + b) - extend
    before, total = _tokens_before(extend_lens, b, batch, BLOCK_B)
    if part == 0:
        tl.store(prefix_lens + b, prefix)
        tl.store(query_offsets + b, before)
        if b == batch - 1:
            tl.store(query_offsets + batch, total)
    if positions is not None:
        for begin in range(part * CHUNK, extend, splits * CHUNK):
            j = begin + tl.arange(0, CHUNK)
            inside = (j < extend) & (before + j < num_tokens)
            tl.store(positions + before + j, (prefix + j).to(tl.int64), mask=inside)
        _fill_tail(positions, total, num_tokens, 0, batch * splits, CHUNK)


@triton.jit
def _entries(line, columns, start, j, live, PAGE: tl.constexpr):
    """Entries `j` of a request's row: the slot of a page's first token, over the page size."""
    column = tl.minimum(start + j * PAGE, columns - 1)
    entry = tl.load(line + column, mask=live, other=0)
    if PAGE > 1:  # rounded down, as torch does; the hardware rounds towards zero
        entry = tl.where(entry < 0, -((PAGE - 1 - entry) // PAGE), entry // PAGE)
    return entry


@triton.jit
def _table(
    rows, seq_lens, extend_lens, source, source_row, columns,
    kv_start, kv_lens, indptr, last_page_len, out, window, size, b, part, batch, splits,
    KIND: tl.constexpr, PAGE: tl.constexpr, FILL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """One request's part of one table. `size` is the length of CSR indices, the width of a block table."""
    seq_len = tl.load(seq_lens + b)
    start, count = _extent(seq_len, _prefix_of(seq_len, extend_lens, b, True), window, PAGE)
    if part == 0:
        tl.store(kv_start + b, start)
        tl.store(kv_lens + b, seq_len - start)
    if KIND == 1:
        before, total = _entries_before(seq_lens, extend_lens, window, b, batch, PAGE, BLOCK_B)
        if part == 0:
            tl.store(indptr + b, before)
            tl.store(last_page_len + b, seq_len - start - tl.maximum(count - 1, 0) * PAGE)
            if b == batch - 1:
                tl.store(indptr + batch, total)
        line = source + tl.load(rows + b) * source_row
        for begin in range(part * CHUNK, count, splits * CHUNK):
            j = begin + tl.arange(0, CHUNK)
            live = (j < count) & (before + j < size)
            entry = _entries(line, columns, start, j, live, PAGE)
            tl.store(out + before + j, entry.to(out.dtype.element_ty), mask=live)
        _fill_tail(out, total, size, FILL, batch * splits, CHUNK)
    if KIND == 2:
        line = source + tl.load(rows + b) * source_row
        target = out + b.to(tl.int64) * size
        for begin in range(part * CHUNK, size, splits * CHUNK):
            j = begin + tl.arange(0, CHUNK)
            entry = _entries(line, columns, start, j, j < count, PAGE).to(out.dtype.element_ty)
            tl.store(target + j, tl.where(j < count, entry, FILL), mask=j < size)


@triton.jit
def _slot(
    rows, seq_lens, extend_lens, encoder_lens, source, encoder_source,
    source_row, source_columns, encoder_row, encoder_columns,
    kv_start, kv_lens, indptr, last_page_len, out, window, size, b, part, batch, splits,
    ENCODER: tl.constexpr, KIND: tl.constexpr, PAGE: tl.constexpr, FILL: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """The table of one group, from the decoder's tokens or the encoder's."""
    if ENCODER:
        _table(rows, encoder_lens, None, encoder_source, encoder_row, encoder_columns,
               kv_start, kv_lens, indptr, last_page_len, out, window, size, b, part, batch, splits,
               KIND, PAGE, FILL, CHUNK, BLOCK_B)  # fmt: skip
    else:
        _table(rows, seq_lens, extend_lens, source, source_row, source_columns,
               kv_start, kv_lens, indptr, last_page_len, out, window, size, b, part, batch, splits,
               KIND, PAGE, FILL, CHUNK, BLOCK_B)  # fmt: skip


# Groups are numbered argument slots. A tuple of tensors would be shorter, but is not lowered by every
# compiler that bears Triton's name and is not what a direct launch passes. A device tensor of addresses
# needs an upload of its own whenever storage moves (every eager step), costs a dependent load in front of
# all others, and hides the tensors from whatever records the launch. Absent slots are None: no code.
@triton.jit(do_not_specialize=_VARYING)
def metadata_kernel(
    rows, seq_lens, extend_lens, encoder_lens, source, encoder_source,
    prefix_lens, query_offsets, positions,
    kv_start0, kv_lens0, indptr0, last_page_len0, out0,
    kv_start1, kv_lens1, indptr1, last_page_len1, out1,
    kv_start2, kv_lens2, indptr2, last_page_len2, out2,
    kv_start3, kv_lens3, indptr3, last_page_len3, out3, ranges,
    source_row, source_columns, encoder_row, encoder_columns, batch, num_tokens, splits,
    window0, size0, window1, size1, window2, size2, window3, size3, num_ranges, window,
    GROUPS: tl.constexpr, ENCODER: tl.constexpr, KIND: tl.constexpr, PAGE: tl.constexpr,
    FILL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr, SUB: tl.constexpr, HAS_WINDOW: tl.constexpr, MIN_TILES: tl.constexpr,
    SPLIT: tl.constexpr, OWN: tl.constexpr, DEAL_B: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid `(B * splits, 1 + GROUPS)`; part p of a request takes its chunks p, p + splits, ….

    Bit g of ENCODER: group g lists the encoder's tokens. `prefix_lens` None: job 0 has nothing to do.
    `ranges`: one job more, for which the grid may be longer: the decode step of `window` is dealt out from
    its lengths (BLOCK_N and the following: see `ranges_kernel`), whose tables other programs are writing.
    """
    job = tl.program_id(1)
    b = tl.program_id(0) // splits
    part = tl.program_id(0) % splits
    if ranges is not None:
        if job == GROUPS + 1:
            if tl.program_id(0) < num_ranges:
                deal(rows, seq_lens, extend_lens, ranges, tl.program_id(0), batch, num_ranges, window,
                     BLOCK_N, SUB, HAS_WINDOW, MIN_TILES, SPLIT, OWN, DEAL_B, PARTS, PAGE)  # fmt: skip
        job = tl.where(b < batch, job, GROUPS + 1)  # the other jobs have fewer programs
    if prefix_lens is not None:
        if job == 0:
            _step(seq_lens, extend_lens, prefix_lens, query_offsets, positions,
                  b, part, batch, num_tokens, splits, CHUNK, BLOCK_B)  # fmt: skip
    if GROUPS > 0:
        if job == 1:
            _slot(rows, seq_lens, extend_lens, encoder_lens, source, encoder_source,
                  source_row, source_columns, encoder_row, encoder_columns,
                  kv_start0, kv_lens0, indptr0, last_page_len0, out0, window0, size0,
                  b, part, batch, splits, ENCODER & 1, KIND, PAGE, FILL, CHUNK, BLOCK_B)  # fmt: skip
    if GROUPS > 1:
        if job == 2:
            _slot(rows, seq_lens, extend_lens, encoder_lens, source, encoder_source,
                  source_row, source_columns, encoder_row, encoder_columns,
                  kv_start1, kv_lens1, indptr1, last_page_len1, out1, window1, size1,
                  b, part, batch, splits, ENCODER & 2, KIND, PAGE, FILL, CHUNK, BLOCK_B)  # fmt: skip
    if GROUPS > 2:
        if job == 3:
            _slot(rows, seq_lens, extend_lens, encoder_lens, source, encoder_source,
                  source_row, source_columns, encoder_row, encoder_columns,
                  kv_start2, kv_lens2, indptr2, last_page_len2, out2, window2, size2,
                  b, part, batch, splits, ENCODER & 4, KIND, PAGE, FILL, CHUNK, BLOCK_B)  # fmt: skip
    if GROUPS > 3:
        if job == 4:
            _slot(rows, seq_lens, extend_lens, encoder_lens, source, encoder_source,
                  source_row, source_columns, encoder_row, encoder_columns,
                  kv_start3, kv_lens3, indptr3, last_page_len3, out3, window3, size3,
                  b, part, batch, splits, ENCODER & 8, KIND, PAGE, FILL, CHUNK, BLOCK_B)  # fmt: skip
