"""Stand-ins for FlashAttention-3 as three distributions ship it: tokenspeed-fa3, sglang-kernel, vllm.

Signatures of tokenspeed-fa3 3.0.0.post20260810, sglang-kernel 0.4.10, vllm 0.33.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from anyattn.testing.emulators.flash_attention_3 import forward, scheduler_metadata
from anyattn.testing.emulators.flash_attention_call import Build, Forward, Heads, Mask
from anyattn.testing.emulators.modules import EmulationError, current_host, module_tree
from anyattn.testing.emulators.softmax import check

__all__ = [
    "TOKENSPEED",
    "contiguous",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "modules",
    "refuse_unknown",
    "scale_of",
]

Tensor = torch.Tensor
_CONFIG = {
    "build_flags": {
        "FLASHATTENTION_DISABLE_BACKWARD": True,
        "FLASHATTENTION_DISABLE_SPLIT": False,
        "FLASHATTENTION_DISABLE_PAGEDKV": False,
        "FLASHATTENTION_DISABLE_APPENDKV": False,
        "FLASHATTENTION_DISABLE_LOCAL": False,
        "FLASHATTENTION_DISABLE_SOFTCAP": True,
        "FLASHATTENTION_DISABLE_PACKGQA": False,
        "FLASHATTENTION_DISABLE_FP16": False,
        "FLASHATTENTION_DISABLE_FP8": False,
        "FLASHATTENTION_DISABLE_VARLEN": False,
        "FLASHATTENTION_DISABLE_CLUSTER": False,
        "FLASHATTENTION_DISABLE_HDIM64": False,
        "FLASHATTENTION_DISABLE_HDIM96": True,
        "FLASHATTENTION_DISABLE_HDIM128": False,
        "FLASHATTENTION_DISABLE_HDIM192": False,
        "FLASHATTENTION_DISABLE_HDIM256": False,
        "FLASHATTENTION_DISABLE_SM8x": True,
        "FLASHATTENTION_ENABLE_VCOLMAJOR": False,
        "FLASH_ATTENTION_DISABLE_HDIMDIFF64": True,
        "FLASH_ATTENTION_DISABLE_HDIMDIFF192": True,
    }
}
TOKENSPEED = Build(softcap=False, unequal=False)
"""What tokenspeed-fa3 was built with."""
_SGLANG = Build(softcap=True, unequal=True)


def refuse_unknown(**given: Any) -> None:
    """Arguments that the library takes and its stand-in doesn't know: they must be at rest.

    Raises:
        EmulationError: one is set.
    """
    for name, value in given.items():
        if isinstance(value, torch.Tensor) or value:
            raise EmulationError(f"{name} isn't emulated", asked=name, allowed="left out")


def modules() -> Mapping[str, ModuleType]:
    """Fresh modules: `flash_attn_interface`, `sgl_kernel.flash_attn`, `vllm.vllm_flash_attn`."""
    from anyattn.testing.emulators import flash_attention_operators, flash_attention_vllm

    operators = flash_attention_operators
    vllm = {name: getattr(flash_attention_vllm, name) for name in flash_attention_vllm.__all__}
    upstream = {
        "flash_attn_with_kvcache": flash_attn_with_kvcache,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "get_scheduler_metadata": get_scheduler_metadata,
        "flash_attn_3_gpu": SimpleNamespace(
            fwd=operators.ForwardOperator(), get_scheduler_metadata=operators.SchedulerOperator()
        ),
    }
    sglang = {
        "flash_attn_with_kvcache": _sgl_with_kvcache,
        "flash_attn_varlen_func": _sgl_varlen,
        "get_scheduler_metadata": _sgl_metadata,
        "is_fa3_supported": _sgl_supported,
    }
    return module_tree(
        {
            "flash_attn_config": {"CONFIG": {"build_flags": dict(_CONFIG["build_flags"])}},
            "flash_attn_interface": upstream,
            "flash_attn_3._C": {},
            "sgl_kernel": {"__version__": "0.4.10"},
            "sgl_kernel.flash_attn": sglang,
            "vllm": {"__version__": "0.33.0"},
            "vllm.vllm_flash_attn": vllm,
            "vllm.vllm_flash_attn.flash_attn_interface": vllm,
        }
    )


def _lengths(lengths: int | Tensor | None, rows: int) -> Tensor | None:
    return torch.full((rows,), lengths, dtype=torch.int32) if isinstance(lengths, int) else lengths


def contiguous(x: Tensor | None) -> Any:
    """What the wrappers pass on: they copy what has strides in its last dimension."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def scale_of(given: float | None, q: Tensor, qv: Tensor | None) -> float:
    """The softmax scale where none is given: 1 / sqrt of the sizes of q and qv together."""
    return float(given) if given is not None else (q.shape[-1] + (0 if qv is None else qv.shape[-1])) ** -0.5


def _result(found: tuple[Tensor, ...], lse: bool) -> Any:
    return found if lse else found[0]


# --- tokenspeed-fa3 (and the upstream project) ------------------------------------------------------------


def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, qv: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
    page_table: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None, max_seqlen_q: Any = None,
    rotary_seqlens: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    softmax_scale: Any = None, causal: Any = False, window_size: Any = (-1, -1), attention_chunk: Any = 0,
    softcap: Any = 0.0, rotary_interleaved: Any = True, scheduler_metadata: Any = None, num_splits: Any = 0,
    pack_gqa: Any = None, sm_margin: Any = 0, return_softmax_lse: Any = False, sinks: Any = None,
) -> Any:  # fmt: skip
    """tokenspeed-fa3: attention over a cache by pages; out, or `(out, lse, out_accum, lse_accum)`."""
    refuse_unknown(
        k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens,
        attention_chunk=attention_chunk,
    )  # fmt: skip
    assert k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension"
    assert v_cache.stride(-1) == 1, "v_cache must have contiguous last dimension"
    call = Forward(
        q=contiguous(q), k=k_cache, v=v_cache, qv=qv, cu_seqlens_q=cu_seqlens_q,
        seqused_k=_lengths(cache_seqlens, q.shape[0]), max_seqlen_q=max_seqlen_q,
        page_table=contiguous(page_table), q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        softmax_scale=scale_of(softmax_scale, q, qv), causal=causal, window=window_size, softcap=softcap,
        metadata=scheduler_metadata, num_splits=num_splits, pack_gqa=pack_gqa, sinks=sinks,
    )  # fmt: skip
    return _result(forward(call, TOKENSPEED), return_softmax_lse)


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    seqused_q: Any = None, seqused_k: Any = None, softmax_scale: Any = None, causal: Any = False,
    qv: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    window_size: Any = (-1, -1), attention_chunk: Any = 0, softcap: Any = 0.0, num_splits: Any = 1,
    pack_gqa: Any = None, deterministic: Any = False, sm_margin: Any = 0, return_attn_probs: Any = False,
    sinks: Any = None,
) -> Any:  # fmt: skip
    """tokenspeed-fa3: ragged attention, no table; out, or `(out, lse)`. `deterministic` is the backward's."""
    refuse_unknown(attention_chunk=attention_chunk)
    call = Forward(
        q=contiguous(q), k=contiguous(k), v=v, qv=qv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q, seqused_k=seqused_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        softmax_scale=scale_of(softmax_scale, q, qv), causal=causal, window=window_size, softcap=softcap,
        num_splits=num_splits, pack_gqa=pack_gqa, sinks=sinks,
    )  # fmt: skip
    return _result(forward(call, TOKENSPEED)[:2], return_attn_probs)


def get_scheduler_metadata(
    batch_size: Any, max_seqlen_q: Any, max_seqlen_k: Any, num_heads_q: Any, num_heads_kv: Any, headdim: Any,
    cache_seqlens: Any, qkv_dtype: Any = torch.bfloat16, headdim_v: Any = None, cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None, cache_leftpad: Any = None, page_size: Any = None, max_seqlen_k_new: Any = 0,
    causal: Any = False, window_size: Any = (-1, -1), attention_chunk: Any = 0, has_softcap: Any = False,
    num_splits: Any = 0, pack_gqa: Any = None, sm_margin: Any = 0,
) -> Tensor:  # fmt: skip
    """tokenspeed-fa3: the scheduler's numbers for `flash_attn_with_kvcache`, int32 on the device."""
    refuse_unknown(
        cu_seqlens_k_new=cu_seqlens_k_new, cache_leftpad=cache_leftpad, max_seqlen_k_new=max_seqlen_k_new,
        attention_chunk=attention_chunk,
    )  # fmt: skip
    halves = (torch.float16, torch.bfloat16)
    check(
        qkv_dtype in (*halves, torch.float8_e4m3fn), "FlashAttention only supports fp16, bf16, and fp8_e4m3"
    )
    check(
        num_heads_q % num_heads_kv == 0, "Number of heads in key/value must divide number of heads in query"
    )
    v_dim = headdim if headdim_v is None else headdim_v
    return scheduler_metadata(
        Heads(num_heads_q, num_heads_kv, headdim, v_dim, qkv_dtype == torch.float8_e4m3fn),
        Mask.of(causal, window_size, max_seqlen_q, max_seqlen_k, headdim, page_size is not None),
        batch_size=batch_size, num_splits=num_splits, page_size=page_size, cache_seqlens=cache_seqlens,
        cu_seqlens_q=cu_seqlens_q, pack_gqa=pack_gqa,
    )  # fmt: skip


# --- sglang-kernel ------------------------------------------------------------------------------------------


def _sgl_supported(device: Any = None) -> bool:
    return str(current_host() or "").startswith(("cuda:sm9", "cuda:sm8"))


def _sgl_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, qv: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
    page_table: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None, max_seqlen_q: Any = None,
    rotary_seqlens: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    softmax_scale: Any = None, causal: Any = False, window_size: Any = (-1, -1), attention_chunk: Any = None,
    softcap: Any = 0.0, rotary_interleaved: Any = True, scheduler_metadata: Any = None, num_splits: Any = 0,
    pack_gqa: Any = None, only_qv: Any = False, sm_margin: Any = 0, return_softmax_lse: Any = False,
    sinks: Any = None, score_mod: Any = None, aux_tensors: Any = None, ver: Any = 3, out: Any = None,
) -> Any:  # fmt: skip
    """sglang-kernel. `score_mod`, `aux_tensors` and `ver` are taken and not used."""
    refuse_unknown(
        k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens,
        attention_chunk=attention_chunk,
    )  # fmt: skip
    if v_cache is None:
        raise ValueError("v_cache must be provided")
    if (k_cache is None or q is None) and not only_qv:
        raise ValueError("q and k_cache can only be None when only_qv=True")
    if k_cache is None:
        k_cache = v_cache.new_empty((*v_cache.shape[:-1], 64 if q is None else q.shape[-1]))
    if q is None:
        q = qv.new_empty((*qv.shape[:-1], k_cache.shape[-1]))
    assert k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension"
    call = Forward(
        q=contiguous(q), k=k_cache, v=v_cache, qv=qv, only_qv=only_qv, out=out, cu_seqlens_q=cu_seqlens_q,
        seqused_k=_lengths(cache_seqlens, q.shape[0]), max_seqlen_q=max_seqlen_q,
        page_table=contiguous(page_table), q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        softmax_scale=scale_of(softmax_scale, qv if only_qv else q, None if only_qv else qv), causal=causal,
        window=window_size, softcap=softcap, metadata=scheduler_metadata,
        num_splits=num_splits, pack_gqa=pack_gqa, sinks=sinks,
    )  # fmt: skip
    return _result(forward(call, _SGLANG), return_softmax_lse)


def _sgl_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any = None,
    max_seqlen_k: Any = None, seqused_q: Any = None, seqused_k: Any = None, page_table: Any = None,
    softmax_scale: Any = None, causal: Any = False, qv: Any = None, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, window_size: Any = (-1, -1), attention_chunk: Any = 0,
    softcap: Any = 0.0, num_splits: Any = 1, pack_gqa: Any = None, only_qv: Any = False, sm_margin: Any = 0,
    return_softmax_lse: Any = False, sinks: Any = None, score_mod: Any = None, aux_tensors: Any = None,
    ver: Any = 3, out: Any = None,
) -> Any:  # fmt: skip
    """sglang-kernel: ragged attention. `page_table` is taken and *not used*."""
    refuse_unknown(attention_chunk=attention_chunk)
    if not _sgl_supported():
        raise NotImplementedError("flash_attn at sgl-kernel is only supported on sm90 and above")
    if max_seqlen_q is None or max_seqlen_k is None:
        raise ValueError("max_seqlen_q and max_seqlen_k are required for FA3")
    call = Forward(
        q=q, k=k, v=v, qv=qv, only_qv=only_qv, out=out, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q, seqused_k=seqused_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        softmax_scale=scale_of(softmax_scale, q, qv), causal=causal, window=window_size, softcap=softcap,
        num_splits=num_splits, pack_gqa=pack_gqa, sinks=sinks,
    )  # fmt: skip
    return _result(forward(call, _SGLANG), return_softmax_lse)


def _sgl_metadata(
    batch_size: Any, max_seqlen_q: Any, max_seqlen_k: Any, num_heads: Any, num_heads_k: Any, headdim: Any,
    cache_seqlens: Any, qkv_dtype: Any = torch.bfloat16, headdim_v: Any = None, cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None, cu_seqlens_k_new: Any = None, seqused_q: Any = None, leftpad_k: Any = None,
    page_size: Any = None, max_seqlen_k_new: Any = 0, causal: Any = False, window_size: Any = (-1, -1),
    attention_chunk: Any = 0, has_softcap: Any = False, num_splits: Any = 0, pack_gqa: Any = None,
    sm_margin: Any = 0,
) -> Tensor:  # fmt: skip
    """sglang-kernel: other names (`num_heads`), more arguments in between, the same numbers."""
    refuse_unknown(cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q)
    return get_scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, cache_seqlens, qkv_dtype,
        headdim_v, cu_seqlens_q, cu_seqlens_k_new, leftpad_k, page_size, max_seqlen_k_new, causal,
        window_size, attention_chunk, has_softcap, num_splits, pack_gqa, sm_margin,
    )  # fmt: skip
