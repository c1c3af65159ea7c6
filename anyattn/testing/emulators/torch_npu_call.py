"""A call of fused infer attention under one set of names, and what the library refuses of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.testing.emulators.modules import EmulationError
from anyattn.testing.emulators.softmax import check
from anyattn.testing.emulators.torch_npu_caches import chip
from anyattn.testing.emulators.torch_npu_layouts import LAYOUTS, Shape, shape_of

__all__ = ["FIA", "ROPE", "UNBOUNDED", "check_call", "checked_shape", "value_dim"]

Tensor = torch.Tensor
HALVES = (torch.float16, torch.bfloat16)
UNBOUNDED = 2147483647
ROPE = 64
_LATENT = 512
_TND_DIMS = ((64, 64), (128, 128), (192, 192), (192, 128))


@dataclass(frozen=True)
class FIA:
    """One call, under the first version's names.

    `v2`: the second version; `sink`: its learnable sink.
    """

    v2: bool
    query: Tensor
    key: Tensor
    value: Tensor
    q_rope: Tensor | None
    k_rope: Tensor | None
    mask: Tensor | None
    q_lens: Sequence[int] | None
    kv_lens: Sequence[int] | None
    table: Tensor | None
    heads: int
    kv_heads: int
    scale: float
    pre: int
    next: int
    layout: str
    sparse: int
    block: int
    precise: int
    lse: bool
    sink: Tensor | None = None

    @staticmethod
    def of(call: Mapping[str, Any], v2: bool) -> FIA:
        """From either schema. Raises `EmulationError` for quantisation, shifts, paddings and prefixes."""
        q_lens, kv_lens, heads, scale, lse = (
            ("actual_seq_qlen", "actual_seq_kvlen", "num_query_heads", "softmax_scale", "return_softmax_lse")
            if v2
            else ("actual_seq_lengths", "actual_seq_lengths_kv", "num_heads", "scale", "softmax_lse_flag")
        )
        known = {
            "query", "key", "value", "atten_mask", q_lens, kv_lens, "block_table", "query_rope", "key_rope",
            heads, scale, "pre_tokens", "next_tokens", "input_layout", "num_key_value_heads", "sparse_mode",
            "inner_precise", "block_size", lse, "learnable_sink",
        }  # fmt: skip
        for name, value in call.items():
            if name not in known and (isinstance(value, torch.Tensor) or value not in (None, 0)):
                raise EmulationError(f"{name} isn't emulated", asked=name, allowed="its default")
        count = call[heads]
        return FIA(
            v2, call["query"], call["key"], call["value"], call["query_rope"], call["key_rope"],
            call["atten_mask"], call[q_lens], call[kv_lens], call["block_table"], count,
            call["num_key_value_heads"] or count, call[scale], call["pre_tokens"], call["next_tokens"],
            call["input_layout"], call["sparse_mode"], call["block_size"], call["inner_precise"], call[lse],
            call.get("learnable_sink"),
        )  # fmt: skip

    @property
    def tnd(self) -> bool:
        """Queries of all requests lie one behind the other, with cumulative lengths."""
        return self.layout.startswith("TND")


def checked_shape(fia: FIA) -> Shape:
    """Raises `RuntimeError` for layouts and head counts that nothing takes."""
    check(fia.layout in LAYOUTS, f"input_layout {fia.layout} isn't supported")
    shape = shape_of(fia.layout, fia.query, fia.heads)
    check(fia.heads % fia.kv_heads == 0, f"{fia.heads} heads aren't shared by {fia.kv_heads}")
    few = fia.q_rope is not None or fia.heads // fia.kv_heads <= 64
    check(few, "the ratio of num_heads to num_key_value_heads is above 64")
    check(fia.heads <= 256, "N is above 256")
    return shape


def value_dim(fia: FIA) -> int:
    """Head size of values without pages."""
    last = fia.value.shape[-1]
    return last // fia.kv_heads if fia.layout == "BSH" else last


def check_call(fia: FIA, shape: Shape, q_lens: Sequence[int]) -> None:
    """Raises `RuntimeError` for what the documents refuse."""
    longest = max(q_lens, default=0)
    dtypes = HALVES if chip() != "310p" else (torch.float16,)
    check(fia.query.dtype in dtypes, f"query's dtype {fia.query.dtype} isn't supported")
    check(fia.key.dtype == fia.query.dtype == fia.value.dtype, "query, key and value differ in dtype")
    for name, x in (("query", fia.query), ("key", fia.key), ("value", fia.value)):
        check(x.is_contiguous(), f"{name} must be contiguous")
    check(shape.dim % 16 == 0, f"D {shape.dim} isn't a multiple of 16")
    check((fia.q_rope is None) == (fia.k_rope is None), "query_rope and key_rope come together")
    if fia.q_rope is not None:
        _check_latent(fia, shape, q_lens)
    elif fia.tnd:
        _check_tnd(fia, shape)
    else:
        check(shape.dim <= 512, "D is above 512")
    if fia.table is not None:
        _check_pages(fia, longest)
    if fia.sink is not None:
        _check_sink(fia, shape)


def _check_tnd(fia: FIA, shape: Shape) -> None:
    check(fia.sparse in (0, 3, 4), f"with TND sparse_mode can't be {fia.sparse}")
    check(fia.sparse != 0 or fia.mask is None, "with TND sparse_mode 0 takes no mask")
    value = shape.dim if fia.table is not None else value_dim(fia)
    text = f"When layout is TND, queryD({shape.dim}) and valueD({value}) must be same equal 192/128/64"
    check((shape.dim, value) in _TND_DIMS, f"{text}, or 192 and 128")


def _check_latent(fia: FIA, shape: Shape, q_lens: Sequence[int]) -> None:
    assert fia.q_rope is not None
    assert fia.k_rope is not None
    longest = max(q_lens, default=0)
    check(fia.q_rope.shape[-1] in (ROPE, ROPE * fia.heads), "query_rope's D must be 64")
    for name, x in (("query_rope", fia.q_rope), ("key_rope", fia.k_rope)):
        check(x.dtype == fia.query.dtype, f"{name} has another dtype than the query")
        check(x.is_contiguous(), f"{name} must be contiguous")
    if shape.dim == 128:
        check(fia.v2 and fia.layout == "TND" and fia.table is None, "rope beside D 128: v2, TND, no pages")
        return
    check(shape.dim == _LATENT, f"with query_rope D must be 512 (or 128), not {shape.dim}")
    check(fia.table is not None, "latents need a block table")
    check(fia.block in (16, 128), f"with query_rope block_size must be 16 or 128, not {fia.block}")
    check(fia.key.dim() != 5 or fia.block == 128, "NZ latents need blocks of 128")
    check(fia.kv_heads == 1, "with query_rope key's N must be 1")
    heads = (1, 2, 4, 8, 16, 32, 64, 128) if fia.v2 else (32, 64, 128)
    check(fia.heads in heads, f"with query_rope N must be one of {heads}, not {fia.heads}")
    check(fia.v2 or not fia.tnd, "the first version takes no TND of D 512")
    check(1 <= longest <= 16, f"with query_rope a request has 1 to 16 queries, not {longest}")
    if longest > 1:
        check(fia.sparse == 3 and fia.mask is not None, "with query_rope and Q_S above 1: sparse_mode 3")
    elif not fia.tnd:
        check(fia.sparse == 0 and fia.mask is None, "with query_rope and Q_S 1: sparse_mode 0 without a mask")


def _check_pages(fia: FIA, longest: int) -> None:
    check(fia.kv_lens is not None, "with block_table actual_seq_lengths_kv must be given")
    check(fia.key.shape == fia.value.shape, "key and value over pages must have one shape")
    check(fia.block > 0, "block_size must not be 0 with a block table")
    rank = fia.key.dim()
    page = fia.key.shape[1] if rank == 3 else fia.key.shape[2] if rank == 4 else fia.key.shape[3]
    check(page == fia.block, f"block_size {fia.block} isn't the cache's {page}")
    check(fia.key.numel() < 2**31, "key and value have 2**31 elements or more")
    if fia.q_rope is not None:
        return
    check(rank != 5, "NZ caches are for latents or int8")
    if longest > 1:
        fits = fia.block % 128 == 0 and fia.block <= 512
        check(fits, f"block_size must be a multiple of 128 up to 512, not {fia.block}")
    else:
        check(fia.block % 16 == 0 and fia.block <= 512, f"block_size {fia.block} isn't a multiple of 16")


def _check_sink(fia: FIA, shape: Shape) -> None:
    assert fia.sink is not None
    check(fia.tnd and shape.dim <= 128, "learnable_sink: TND and D up to 128 alone")
    check(fia.sink.dtype == torch.bfloat16 == fia.query.dtype, "learnable_sink must be bfloat16")
    check(tuple(fia.sink.shape) == (fia.heads,), f"learnable_sink must be [{fia.heads}]")
    if fia.lse:
        raise EmulationError("no document says whether the LSE has the sink", asked="both", allowed="one")
