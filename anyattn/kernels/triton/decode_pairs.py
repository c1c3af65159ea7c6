"""Decode over 8-bit keys that are read as 16-bit words: two neighbouring elements of a head each.

A word is split in registers, into an operand of even elements and one of odd ones. Shared memory has no
transposing load of bytes: values kept as such are put together one by one, a third of all instructions.
"""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

import triton
import triton.language as tl

from anyattn.kernels.triton.common import capped, page_offsets, table_slots

__all__ = ["halves", "stream_pairs"]

_E5M2_PAIRS = tl.constexpr("prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00;")
_E4M3_PAIRS = tl.constexpr(
    "{ .reg .b32 both; .reg .b16 even, odd; prmt.b32 both, $2, 0, 0x3120; mov.b32 {even, odd}, both;"
    " cvt.rn.f16x2.e4m3x2 $0, even; cvt.rn.f16x2.e4m3x2 $1, odd; }"
)


@triton.jit
def _e4m3(byte):
    """float16 of the e4m3 in the upper byte: its bits one place down are the same number, 2^-8 as large."""
    small = ((byte & -32768) | ((byte >> 1) & 0x3F80)).to(tl.float16, bitcast=True)
    return tl.where((byte & 0x7F00) == 0x7F00, float("nan"), small * 256.0).to(tl.float16)


@triton.jit
def halves(words, element: tl.constexpr, PAIRS: tl.constexpr):
    """float16 of the low and of the high bytes of `words`, which are e4m3fn or e5m2: the very same numbers.

    PAIRS 2: four bytes in three instructions, of sm_89 and later; 1: by what the interpreter has.
    """
    if PAIRS == 2:
        if element == tl.float8e5:
            low, high = tl.inline_asm_elementwise(
                _E5M2_PAIRS, "=r,=r,r", [words], (tl.float16, tl.float16), is_pure=True, pack=2
            )
        else:
            low, high = tl.inline_asm_elementwise(
                _E4M3_PAIRS, "=r,=r,r", [words], (tl.float16, tl.float16), is_pure=True, pack=2
            )
    elif element == tl.float8e5:  # the upper byte of a float16
        low = (words << 8).to(tl.float16, bitcast=True)
        high = (words & -256).to(tl.float16, bitcast=True)
    else:
        low = _e4m3(words << 8)
        high = _e4m3(words & -256)
    return low, high


@triton.jit
def _words(base, offsets, columns, live, COLUMNS: tl.constexpr):
    """Words `[N, BLOCK]` of rows at byte `offsets [N]`; zero where there is none."""
    rows = (base + offsets).to(tl.pointer_type(tl.int16))
    return tl.load(
        rows[:, None] + columns[None, :], mask=live[:, None] & (columns < COLUMNS)[None, :], other=0
    )


@triton.jit
def stream_pairs(
    q, b, row, start, length, lo, hi, source, source_row, slot_map, k_base, v_base, q_t, q_h,
    k_page, k_row, v_page, v_row, heads, in_group, logit_scale, cap, window,
    PAGE: tl.constexpr, SUB: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PAIRS: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Keys `lo` to `hi` of request `b`, from column `start` on: the softmax's state `(m, den, acc)`.

    Query rows are brought to [-1, 1] and multiplied as float16.
    """
    offs_d = tl.arange(0, BLOCK_D // 2)
    offs_dv = tl.arange(0, BLOCK_DV // 2)
    offs_n = tl.arange(0, BLOCK_N)
    entry = tl.arange(0, BLOCK_N // SUB) * SUB
    first_seen = length - window
    columns = tl.arange(0, BLOCK_D)
    q_ptr = q + b.to(tl.int64) * q_t + heads[:, None] * q_h + columns[None, :]
    query = tl.load(q_ptr, mask=in_group[:, None] & (columns < D)[None, :], other=0.0).to(tl.float32)
    top = tl.maximum(tl.max(tl.abs(query), 1), 1e-20)
    query = (query / top[:, None]).to(tl.float16)
    even, odd = tl.split(tl.reshape(query, [BLOCK_H, BLOCK_D // 2, 2]))
    base2 = tl.full([BLOCK_H], 1.0, tl.float32) if HAS_CAP else top * (logit_scale * 1.4426950408889634)
    table = source + row.to(tl.int64) * source_row + start
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    # Summed over keys in every tile: kept for each key until the end it takes registers, and 10 % more time.
    den = tl.zeros([BLOCK_H], tl.float32)
    acc_even = tl.zeros([BLOCK_H, BLOCK_DV // 2], tl.float32)
    acc_odd = tl.zeros([BLOCK_H, BLOCK_DV // 2], tl.float32)
    ahead = table_slots(table, lo + entry, lo + entry < hi, slot_map)
    for n in range(lo, hi, BLOCK_N):
        slots = ahead  # table entries of the next tile are fetched before this tile's keys
        ahead = table_slots(table, n + BLOCK_N + entry, n + BLOCK_N + entry < hi, slot_map)
        live = n + offs_n < hi
        k_off = page_offsets(slots, k_page, k_row, PAGE, SUB, BLOCK_N, FLAT, WIDE)
        key = _words(k_base, k_off, offs_d, live, D // 2)
        v_off = page_offsets(slots, v_page, v_row, PAGE, SUB, BLOCK_N, FLAT, WIDE)
        value = _words(v_base, v_off, offs_dv, live, DV // 2)
        k_even, k_odd = halves(key, k_base.dtype.element_ty, PAIRS)
        qk = tl.dot(odd, tl.trans(k_odd), tl.dot(even, tl.trans(k_even)))
        if HAS_CAP:
            qk = capped(qk * top[:, None], logit_scale, cap)
        seen = live
        if HAS_WINDOW:
            seen = seen & (n + offs_n >= first_seen)
        qk = tl.where(seen[None, :], qk, float("-inf"))
        new_m = tl.maximum(m, tl.max(qk, 1) * base2)
        safe = tl.where(new_m == float("-inf"), 0.0, new_m)
        p = tl.exp2(qk * base2[:, None] - safe[:, None])
        alpha = tl.exp2(m - safe)
        den = den * alpha + tl.sum(p, 1)
        v_even, v_odd = halves(value, v_base.dtype.element_ty, PAIRS)
        p = p.to(tl.float16)
        acc_even = tl.dot(p, v_even, acc_even * alpha[:, None])
        acc_odd = tl.dot(p, v_odd, acc_odd * alpha[:, None])
        m = new_m
    return m, den, tl.interleave(acc_even, acc_odd)
