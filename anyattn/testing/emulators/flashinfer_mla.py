"""Stand-in for `BatchMLAPagedAttentionWrapper` in both of its forms (FlashInfer 0.7.2, `mla/_batch_mla`).

Inner backends: fa2 and fa3, and `auto` where it can only mean one of them.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from anyattn.testing.emulators import softmax
from anyattn.testing.emulators.flashinfer_common import (
    LOG2E,
    check_aligned,
    check_like,
    chip,
    host_copy,
    page_rows,
    put,
    use_workspace,
)
from anyattn.testing.emulators.flashinfer_kernel import stamp, stamped
from anyattn.testing.emulators.flashinfer_mla_inputs import (
    CSR,
    MLAPlan,
    MLAPlanMetadata,
    csr_tables,
    halves,
    kv_scales,
)
from anyattn.testing.emulators.flashinfer_tables import fill_buffer
from anyattn.testing.emulators.modules import EmulationError

__all__ = ["BatchMLAPagedAttentionWrapper", "MLAPlanMetadata"]


class BatchMLAPagedAttentionWrapper:
    """Absorbed attention: `[T, H, 512 + 64]` over `[N, P, 512 + 64]`, values are the latent part."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        if backend not in ("auto", "fa2", "fa3"):
            raise EmulationError("MLA wrapper", asked=backend, allowed="auto, fa2, fa3")
        if backend == "auto" and chip() >= 100:
            raise EmulationError("auto chooses anew at every plan here", asked="auto", hint="name a backend")
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        self._use_cuda_graph, self._backend = use_cuda_graph, backend
        self._buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        self._int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)
        self._plan: MLAPlan | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Plan one step, from metadata or from flat tables. Raises what the library raises."""
        flat = (qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens)
        given = metadata or MLAPlanMetadata(*flat, max_q_len)
        if metadata is not None and any(value is not None for value in (*flat, max_q_len)):
            raise ValueError("Both metadata object and flat metadata arguments were provided")
        if metadata is None:
            warnings.warn("flat plan metadata is deprecated", DeprecationWarning, stacklevel=2)
        required = (num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale)
        if any(value is None for value in (*required, q_data_type, kv_data_type)):
            raise TypeError("plan() missing required arguments")
        assert num_heads is not None and head_dim_ckv is not None and head_dim_kpe is not None  # noqa: PT018
        assert page_size is not None and sm_scale is not None  # noqa: PT018
        assert q_data_type is not None and kv_data_type is not None  # noqa: PT018
        if not isinstance(causal, bool):
            raise TypeError("causal and use_profiler must be bools.")
        if use_sinks or skip_softmax or output_scale != "none":
            raise ValueError("sinks, skip_softmax and output scales: not with an fa2/fa3 backend")
        if (output_dtype or q_data_type) != q_data_type:
            raise ValueError("output_dtype must match q_data_type")
        default = "split" if metadata is None else "packed"
        tables = csr_tables(given, page_size, strict=metadata is not None)
        # `_batch_mla/_backends/_fa_common.py` copies all of them but the indices.
        host = [host_copy(n, t) if n != "kv_indices" else t for n, t in zip(CSR, tables, strict=True)]
        plan = MLAPlan(
            num_heads, (head_dim_ckv, head_dim_kpe), page_size, causal, float(sm_scale), q_data_type,
            kv_data_type, query_layout or default, kv_cache_layout or default, lse_mode,
            kv_data_type == torch.float8_e4m3fn, metadata is None, softmax.offsets(host[0]),
            softmax.offsets(host[1]), host[3].tolist(), 0,
        )  # fmt: skip
        self._check(plan, scale_mode)
        self._stage(tables)
        plan.serial = stamp(self._int_workspace_buffer)
        self._plan = plan

    def _check(self, plan: MLAPlan, scale_mode: str) -> None:
        if self._backend == "auto":
            self._backend = "fa3" if chip() == 90 and plan.widths[0] in (128, 256, 512) else "fa2"
        if self._backend == "fa3" and (chip() != 90 or plan.widths[0] not in (128, 256, 512)):
            raise ValueError("fa3 MLA requires SM90 and head_dim_ckv in (128, 256, 512).")
        if plan.widths[0] % 128 or plan.widths[1] % 64:
            raise ValueError("head_dim_ckv must be a multiple of 128 and head_dim_kpe of 64")
        if plan.q_dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"MLA q_data_type {plan.q_dtype} is not supported")
        if plan.fp8:
            if chip() != 90 or plan.q_dtype != torch.bfloat16 or plan.widths not in ((512, 64), (512, 0)):
                raise ValueError("FP8 kv_data_type for MLA: SM90, bfloat16 queries, 512 + 64")
            if scale_mode not in ("default", "kv-per-tensor"):
                raise ValueError("FP8 MLA plans require scale_mode='kv-per-tensor'.")
        elif plan.kv_dtype != plan.q_dtype or scale_mode != "default":
            raise ValueError("non-FP8 KV dtype must match query dtype, with scale_mode='default'")
        if not plan.spans:
            raise ValueError("FA MLA native planning requires a nonempty batch.")
        if plan.causal:
            _check_causal_tiles(plan, self._backend)

    def _stage(self, tables: tuple[torch.Tensor, ...]) -> None:
        """Only the page indices are read when the kernel runs; the rest is in the schedule."""
        if not self._use_cuda_graph:
            self._indices = tables[2].to(self.device)
            return
        for name, buffer, source in zip(CSR, self._buffers, tables, strict=True):
            if buffer is None:
                raise ValueError("CUDA graph mode requires reserved buffers for all tables")
            larger = name == "kv_indices" and buffer.shape[0] >= source.shape[0]
            if buffer.shape != source.shape and not larger:
                raise ValueError(f"CUDA graph reserved {name} buffer has incompatible capacity")
            fill_buffer(buffer, source, head=name == "kv_indices")
        assert self._buffers[2] is not None
        self._indices = self._buffers[2]

    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | None = None,
        bmm2_scale: float | None = None,
    ) -> Any:
        """Attend: `out [T, H, 512]`, or `(out, lse)` in the base that was planned."""
        plan = self._plan
        if plan is None:
            raise RuntimeError("BatchMLAPagedAttentionWrapper.run() called before plan().")
        refused = (kv_len, page_table, o_scale, sinks, skip_softmax_threshold_scale_factor, bmm1_scale)
        if any(value is not None for value in (*refused, bmm2_scale)):
            raise ValueError("an argument that fa2 and fa3 don't have")
        asked = "none"
        if return_lse or lse is not None or return_lse_base_on_e:
            asked = "basee" if return_lse_base_on_e else "base2"
        if asked != plan.lse_mode and not (plan.legacy and plan.lse_mode == "none"):
            raise ValueError(
                f"MLA planned run argument LSE mode mismatch: planned {plan.lse_mode}, got {asked}"
            )
        q = halves("query", query, (q_nope, q_pe), plan.query_layout, plan.widths, plan.q_dtype)
        kv = halves("KV cache", kv_cache, (ckv_cache, kpe_cache), plan.kv_layout, plan.widths, plan.kv_dtype)
        scales = kv_scales(plan, ckv_scale, ckv_scale_arr, kpe_scale)
        for name, x in (("q_nope", q[0]), ("q_pe", q[1]), ("ckv", kv[0]), ("kpe", kv[1])):
            check_aligned(name, x)
        result, natural = self._attend(plan, q, kv, scales)
        if out is None:
            out = torch.empty_like(q[0])
        check_like(out, q[0].shape, plan.q_dtype, "out")
        use_workspace(self._float_workspace_buffer)
        put(out, result, strided=True)
        if not return_lse:
            return out
        value = (natural if return_lse_base_on_e else natural * LOG2E).to(torch.float32)
        lse = torch.empty(q[0].shape[:2], dtype=torch.float32) if lse is None else lse
        check_like(lse, q[0].shape[:2], torch.float32, "lse")
        put(lse, value, strided=False)
        return out, lse

    def _attend(
        self,
        plan: MLAPlan,
        q: tuple[torch.Tensor, torch.Tensor],
        kv: tuple[torch.Tensor, torch.Tensor],
        scales: tuple[float, float],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        queries = torch.cat(q, dim=2)
        out = torch.zeros(*queries.shape[:2], plan.widths[0], dtype=torch.float64)
        natural = torch.full(queries.shape[:2], -math.inf, dtype=torch.float64)
        for index, (start, stop) in enumerate(plan.spans):
            length = plan.lens[index]
            latent, rope = (page_rows(x, self._indices, plan.pages[index], length).double() for x in kv)
            keys = torch.cat((latent * scales[0], rope * scales[1]), dim=1)[:, None]
            seen = softmax.band(stop - start, length, -1, 0 if plan.causal else -1)
            rows = softmax.attend(
                queries[start:stop], keys, keys[..., : plan.widths[0]], seen, scale=plan.sm_scale
            )
            out[start:stop], natural[start:stop] = rows
        if not stamped(self._int_workspace_buffer, plan.serial):
            return out * math.nan, natural * math.nan
        return out, natural


def _check_causal_tiles(plan: MLAPlan, backend: str) -> None:
    """Heads that don't divide a query tile: a tile may end inside a token whose key begins a KV tile."""
    q_lens = [stop - start for start, stop in plan.spans]
    tile = 128 if sum(q_lens) * plan.heads // len(q_lens) > 64 else 64
    if tile % plan.heads == 0:
        return
    step = 64 if backend == "fa3" or not plan.fp8 else 32
    for q_len, length in zip(q_lens, plan.lens, strict=True):
        for end in range(tile, q_len * plan.heads, tile):
            token, rest = divmod(end, plan.heads)
            key = length - q_len + token
            if rest and token < q_len and 0 <= key < length and key % step == 0:
                raise ValueError(f"{backend} MLA causal tile boundary is unsupported: {plan.heads} heads")
