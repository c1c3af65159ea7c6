"""Inputs of FlashInfer's MLA wrapper: metadata, tables, packed and split tensors."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.testing.emulators.flashinfer_common import host_copy
from anyattn.testing.emulators.modules import EmulationError

__all__ = ["CSR", "MLAPlan", "MLAPlanMetadata", "csr_tables", "halves", "kv_scales"]

CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
"""Tables of the planned form."""
_DENSE = ("cum_seq_lens_q", "block_tables", "seq_lens")


@dataclass(frozen=True)
class MLAPlanMetadata:
    """Tables of a plan: token-granular queries, pages, token counts."""

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
    ) -> MLAPlanMetadata:
        """Pages of all requests one after another."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """A row of pages a request."""
        return cls(
            cum_seq_lens_q=cum_seq_lens_q, block_tables=block_tables, seq_lens=seq_lens, max_q_len=max_q_len
        )


@dataclass
class MLAPlan:
    """What a plan fixed; `pages` and `spans` are (start, stop) of each request."""

    heads: int
    widths: tuple[int, int]
    page_size: int
    causal: bool
    sm_scale: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    query_layout: str
    kv_layout: str
    lse_mode: str
    fp8: bool
    legacy: bool
    spans: list[tuple[int, int]]
    pages: list[tuple[int, int]]
    lens: list[int]
    serial: int


def csr_tables(
    given: MLAPlanMetadata, page_size: int, *, strict: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four CSR tables, derived from a block table where that was given."""
    csr = [getattr(given, name) for name in CSR]
    dense = [getattr(given, name) for name in _DENSE]
    if all(x is None for x in csr):
        if any(x is None for x in dense):
            raise TypeError("plan() requires metadata or flat metadata arguments.")
        queries, table, lens = dense
        host_copy("seq_lens", lens)
        pages = [-(-n // page_size) for n in lens.tolist()]
        rows = [table[i, :n] for i, n in enumerate(pages)]
        indptr = torch.tensor([0, *itertools.accumulate(pages)], dtype=torch.int32)
        csr = [queries, indptr, torch.cat(rows), lens]
    for name, x in zip(CSR, csr, strict=True):
        if not torch.is_tensor(x) or x.ndim != 1 or x.dtype != torch.int32 or not x.is_contiguous():
            raise ValueError(f"{name} metadata must be a contiguous int32 tensor of rank 1")
    qo, indptr, indices, lens = csr
    _check_csr(qo, indptr, indices, lens, page_size, strict=strict)
    return qo, indptr, indices, lens


def _check_csr(
    qo: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor, page_size: int,
    *, strict: bool,
) -> None:  # fmt: skip
    for name, offsets in (("qo_indptr", qo), ("kv_indptr", indptr)):
        if not len(offsets) or int(offsets[0]) or bool((offsets[1:] < offsets[:-1]).any()):
            raise ValueError(f"{name} metadata must start at zero and be nondecreasing.")
    canonical = len(indptr) == len(qo) and len(lens) == len(qo) - 1
    if not canonical and strict:
        raise ValueError("CSR metadata batch dimensions must agree")
    if bool((lens < 0).any()):
        raise ValueError("kv_len_arr metadata must be nonnegative.")
    if not canonical:
        return
    if int(indptr[-1]) > len(indices):
        raise ValueError(f"kv_indices metadata has {len(indices)} entries but kv_indptr says {indptr[-1]}")
    if not torch.equal((lens + page_size - 1) // page_size, indptr[1:] - indptr[:-1]):
        raise ValueError("CSR metadata page counts in kv_indptr must equal ceil(kv_len_arr / page_size).")


def kv_scales(
    plan: MLAPlan, ckv: float | None, array: torch.Tensor | None, kpe: float | None
) -> tuple[float, float]:
    """Factors of the latent and the rope part. Raises `ValueError` where fp8 lacks one or others have one."""
    if array is not None:
        raise EmulationError("ckv_scale_arr", asked="a tensor", allowed="ckv_scale")
    if not plan.fp8:
        if ckv is not None or kpe is not None:
            raise ValueError("ckv_scale / kpe_scale are only valid when kv_data_type is FP8.")
        return 1.0, 1.0
    if ckv is None or kpe is None:
        raise ValueError("ckv_scale and kpe_scale are required when kv_data_type is FP8.")
    if not (math.isfinite(ckv) and ckv > 0 and math.isfinite(kpe) and kpe > 0):
        raise ValueError("scales must be finite positive values")
    return float(ckv), float(kpe)


def halves(
    name: str, value: Any, legacy: tuple[torch.Tensor | None, torch.Tensor | None], layout: str,
    widths: tuple[int, int], dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(latent, rope) parts of rank 3, from a packed tensor or an exact pair as planned."""
    if value is None:
        if legacy[0] is None or legacy[1] is None:
            raise TypeError(f"run() requires {name}")
        value = legacy
    elif legacy[0] is not None or legacy[1] is not None:
        raise TypeError(f"pass either {name} or its parts, not both.")
    if torch.is_tensor(value):
        if value.ndim != 3 or value.shape[-1] != sum(widths):
            raise ValueError(f"packed {name} must have rank 3 and the planned widths")
        value = (value[..., : widths[0]], value[..., widths[0] :])
    elif type(value) is not tuple or len(value) != 2:
        raise TypeError(f"{name} structural MLA input must be a tensor or exact 2-tuple.")
    elif layout == "packed" and not _adjacent(*value):
        raise ValueError(f"{name} cannot provide the planned packed representation zero-copy")
    left, right = value
    if left.ndim != 3 or left.shape[:-1] != right.shape[:-1] or (left.shape[-1], right.shape[-1]) != widths:
        raise ValueError(f"split {name} tensors don't match rank, shapes or planned widths")
    if left.dtype != dtype or right.dtype != dtype:
        raise ValueError(f"{name}.dtype={left.dtype} does not match the planned {dtype}")
    return left, right


def _adjacent(left: torch.Tensor, right: torch.Tensor) -> bool:
    same = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    return (
        same
        and left.stride() == right.stride()
        and right.storage_offset() == left.storage_offset() + left.shape[-1]
    )
