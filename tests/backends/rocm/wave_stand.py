"""The parts of wave-lang 3.9.1 that `wave` calls, computed on CPU tensors: real names and argument orders."""

from __future__ import annotations

import enum
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.testing.emulators.modules import module_tree

__all__ = ["COMPILED", "wave_installed"]

COMPILED: list[Any] = []
"""Options of every `wave_compile`, in order."""

_Shape = namedtuple(
    "paged_decode_attention_shape",
    ["num_query_heads", "num_kv_heads", "head_size", "head_size_kv", "block_size", "num_seqs"],
)


class _MMAType(enum.Enum):
    F32_16x16x16_F16 = 0x1020
    F32_16x16x32_K8_F16 = 0x1022


class _MMAOperand(enum.Enum):
    M = 0
    N = 1


@dataclass
class _GenericDot:
    out_vec_size: int = 1
    k_vec_size: int = 4
    k_mult: int = 1
    along_dim: _MMAOperand = _MMAOperand.N


@dataclass(frozen=True)
class _AttentionShape:
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    head_size_kv: int
    max_seq_len: int | None = None


class _Options:
    def __init__(
        self, *, subs: Any, dynamic_symbols: Any, canonicalize: bool = True, run_bench: bool = False,
        wave_runtime: bool = False, use_buffer_ops: bool = False, waves_per_eu: int | None = None,
        denorm_fp_math_f32: str | None = None,
    ) -> None:  # fmt: skip
        self.subs, self.dynamic_symbols, self.target = subs, dynamic_symbols, None


def _compile(options: _Options, kernel: Callable[..., None]) -> Callable[..., str]:
    assert options.target == "gfx942", "set_default_run_config gives the target"
    COMPILED.append(options)

    def launch(*args: Any) -> str:
        # What isn't contiguous is copied, outputs too, and the copy is dropped.
        kernel(*(a.contiguous() if isinstance(a, torch.Tensor) else a for a in args))
        return "assembly"

    return launch


def _config(options: _Options) -> _Options:
    options.target = "gfx942"
    return options


def _softmax(q: torch.Tensor, k: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
    """Logits `[Hq, q, k]` in float64 for `q [q, Hq, D]`, `k [k, Hkv, D]`."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    return cap * torch.tanh(logits / cap) if cap else logits


def _values(v: torch.Tensor, heads: int) -> torch.Tensor:
    return v.double().repeat_interleave(heads // v.shape[1], dim=1)


def _decode_template(
    shape: Any, mfma_variant: Any, num_kv_splits: int, input_dtype: torch.dtype = torch.float16,
    output_dtype: torch.dtype = torch.float16, layer_scaling: float | None = None, logit_cap: float = 0.0,
) -> tuple[Any, ...]:  # fmt: skip
    grouped = shape.num_query_heads != shape.num_kv_heads
    assert isinstance(mfma_variant[0], _MMAType if grouped else _GenericDot)
    scale = layer_scaling or shape.head_size**-0.5

    def parts(q: Any, k: Any, v: Any, indptr: Any, indices: Any, partial: Any, lse: Any) -> None:
        assert q.dtype == k.dtype == input_dtype
        assert partial.shape[:3] == (num_kv_splits, q.shape[0], q.shape[1]) == lse.shape
        assert indptr.dtype == indices.dtype == torch.int32
        for i in range(q.shape[0]):
            slots = indices[indptr[i] : indptr[i + 1]].long()
            for part, own in enumerate(_cut(slots, num_kv_splits)):
                partial[part, i], lse[part, i] = 0.0, -1e6
                if own.numel():
                    logits = _softmax(q[i : i + 1], k[own], scale, logit_cap)[:, 0]
                    lse[part, i] = torch.logsumexp(logits, -1) * 1.4426950408889634
                    weights = torch.softmax(logits, -1)
                    partial[part, i] = torch.einsum("hk,khd->hd", weights, _values(v[own], q.shape[1]))

    def join(partial: Any, lse: Any, indptr: Any, out: Any) -> None:
        weights = torch.softmax(lse.double() * 0.6931471805599453, dim=0)
        out.copy_((weights[..., None] * partial).sum(0))
        assert out.dtype == output_dtype

    return parts, join, {}, {}, ["K2", "N_KV", "S"], ["S"]


def _cut(slots: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    each = -(-slots.numel() // count)
    for part in range(count):
        yield slots[part * each : (part + 1) * each]


def _extend_template(
    shape: Any, mfma_variant: Any, q_shape: Any, k_shape: Any, v_shape: Any, k_cache_shape: Any,
    v_cache_shape: Any, o_shape: Any, input_dtype: torch.dtype = torch.float16,
    output_dtype: torch.dtype = torch.float32, size_dtype: torch.dtype = torch.int32, is_causal: bool = False,
    logit_cap: float = 0.0, layer_scaling: float | None = None, num_waves: int = 4,
    use_custom_mask: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    scale = layer_scaling or shape.head_size**-0.5
    short = shape.max_seq_len <= 128

    def kernel(
        q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, q_indptr: Any, indptr: Any, indices: Any,
        longest: int, out: Any,
    ) -> None:  # fmt: skip
        assert q.dtype == k.dtype == k_cache.dtype == input_dtype
        assert out.dtype == output_dtype
        assert short == (longest <= 128)
        assert longest >= int((q_indptr[1:] - q_indptr[:-1]).max())
        for i in range(indptr.shape[0] - 1):
            own = slice(int(q_indptr[i]), int(q_indptr[i + 1]))
            slots = indices[indptr[i] : indptr[i + 1]].long()
            keys, values = torch.cat([k_cache[slots], k[own]]), torch.cat([v_cache[slots], v[own]])
            count = own.stop - own.start
            logits = _softmax(q[own], keys, scale, logit_cap)
            hidden = (
                torch.ones(count, count, dtype=torch.bool).triu(1) if is_causal else torch.zeros(count, count)
            )
            logits[:, :, slots.numel() :].masked_fill_(hidden.bool(), -1e6)
            out[own] = torch.einsum(
                "hqk,khd->qhd", torch.softmax(logits, -1), _values(values, q.shape[1])
            ).to(out.dtype)

    return kernel, {}, ["N_Q", "N_KV", "S"]


@contextmanager
def wave_installed() -> Iterator[None]:
    """The stand-in in `sys.modules` inside the block."""
    base = "wave_lang.kernel.wave"
    modules = module_tree(
        {
            f"{base}.compile": {"WaveCompileOptions": _Options, "wave_compile": _compile},
            f"{base}.constraints": {
                "MMAType": _MMAType, "MMAOperand": _MMAOperand, "GenericDot": _GenericDot,
            },
            f"{base}.templates.paged_decode_attention": {
                "paged_decode_attention_shape": _Shape,
                "get_paged_decode_attention_kernels": _decode_template,
            },
            f"{base}.templates.extend_attention": {"get_extend_attention_kernel": _extend_template},
            f"{base}.templates.attention_common": {"AttentionShape": _AttentionShape},
            f"{base}.utils.general_utils": {"get_default_scheduling_params": dict},
            f"{base}.utils.run_utils": {"set_default_run_config": _config},
        }
    )  # fmt: skip
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    COMPILED.clear()
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)
