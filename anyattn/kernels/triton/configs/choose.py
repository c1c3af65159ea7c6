"""Which tiles a shape gets. Numbers for sm90 were measured on an H200; the rest are its safe relatives."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Decode", "Extend", "choose_decode", "choose_extend", "power_of_two"]


@dataclass(frozen=True)
class Decode:
    """Split-KV decode: BLOCK_N keys a tile, programs of `num_warps`, `num_splits` parts of a request."""

    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int


@dataclass(frozen=True)
class Extend:
    """Extend: BLOCK_M query rows by BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


def power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << (n - 1).bit_length()


def choose_decode(
    programs: int, max_kv_len: int, head_dim: int, itemsize: int, num_units: int, *, small: bool = False
) -> Decode:
    """Tiles and splits of a decode step.

    Args:
        programs: B x Hkv x head blocks, the grid without splits.
        max_kv_len: bound of KV lengths. num_units: SMs or CUs. itemsize: bytes of a KV element.
        small: little shared memory (64 KiB of LDS), or the interpreter.

    Two fixed configurations and one rule (H200, 31 shapes, geometric mean 1.087 of FlashInfer): as long
    as one program per SM covers the grid, wide tiles; beyond, narrow ones with two programs per SM.
    """
    wide = programs <= num_units
    block_n = (128 if wide else 64) * 128 // max(64, power_of_two(head_dim))
    block_n = block_n * 2 // itemsize if itemsize > 2 else block_n
    stages = 3 if wide else 4
    if small:
        block_n, stages = block_n // 2, 2
    block_n = max(16, min(block_n, 256))
    slots = num_units if wide else 2 * num_units
    splits = max(1, slots // programs)
    tiles = -(-max_kv_len // block_n)
    return Decode(block_n, 4, stages, min(splits, max(1, -(-tiles // 2))))


def choose_extend(
    max_q_rows: int, head_dim: int, itemsize: int, *, target: str = "cuda", small: bool = False
) -> Extend:
    """Tiles of an extend step; `max_q_rows`: query rows (tokens x packed heads) of the longest request."""
    wide_head = power_of_two(head_dim) > 128
    if small or itemsize > 2:
        block_m = 16 if max_q_rows <= 16 else 32
        return Extend(block_m, 32 if not wide_head else 16, 4, 1 if small else 2)
    if max_q_rows <= 16:
        return Extend(16, 64 if not wide_head else 32, 4, 2)
    if max_q_rows <= 64:
        return Extend(64, 64 if not wide_head else 32, 4, 3 if target == "cuda" and not wide_head else 2)
    if wide_head:
        return Extend(64, 32, 4, 2)
    return Extend(128, 64, 8, 2, 128 if target == "cuda" else None)
