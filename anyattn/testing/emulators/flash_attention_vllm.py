"""Stand-in for FlashAttention-3 in vllm's bundle, `vllm.vllm_flash_attn`. Signatures of vllm 0.33.0."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from anyattn.testing.emulators import flash_attention as upstream
from anyattn.testing.emulators.flash_attention_3 import forward
from anyattn.testing.emulators.flash_attention_call import Build, Forward
from anyattn.testing.emulators.modules import EmulationError, current_host

__all__ = [
    "fa_version_unsupported_reason",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
    "is_fa_version_supported",
]

Tensor = torch.Tensor
_BUILD = Build(softcap=True, unequal=True, sinks="s_aux")


def is_fa_version_supported(fa_version: int) -> bool:
    """This chip runs that version."""
    return fa_version_unsupported_reason(fa_version) is None


def fa_version_unsupported_reason(fa_version: int) -> str | None:
    """Why this chip doesn't run that version, or None."""
    if fa_version not in (2, 3, 4):
        raise ValueError(f"Unsupported FA version: {fa_version}")
    chip = str(current_host() or "cuda:sm90").partition(":")[2]
    served = {2: ("sm",), 3: ("sm90",), 4: ("sm90", "sm10", "sm11")}[fa_version]
    if not chip.startswith(served):
        return f"FA{fa_version} is only supported on other devices than {chip}"
    return None


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, max_seqlen_q: Any, cu_seqlens_q: Any, max_seqlen_k: Any, cu_seqlens_k: Any = None,
    seqused_k: Any = None, q_v: Any = None, dropout_p: Any = 0.0, softmax_scale: Any = None,
    causal: Any = False, window_size: Any = None, softcap: Any = 0.0, alibi_slopes: Any = None,
    deterministic: Any = False, return_attn_probs: Any = False, block_table: Any = None,
    return_softmax_lse: Any = False, out: Any = None,
    scheduler_metadata: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    num_splits: Any = 0, output_scale: Any = None, fa_version: Any = 2, s_aux: Any = None,
    cp_world_size: Any = 1, cp_rank: Any = 0, cp_tot_seqused_k: Any = None, mask_mod: Any = None,
    block_sparse_tensors: Any = None, aux_tensors: Any = None, aux_tensor_leading_dims: Any = None,
    dynamic_causal: Any = None, gather_kv_indices: Any = None, gather_kv_valid_length: Any = None,
) -> Any:  # fmt: skip
    """vllm: `fa_version` is 2 unless said; out, or `(out, lse)`. Only version 3 is emulated."""
    assert cu_seqlens_k is not None or seqused_k is not None, "cu_seqlens_k or seqused_k must be provided"
    assert cu_seqlens_k is None or seqused_k is None, "cu_seqlens_k and seqused_k exclude each other"
    assert block_table is None or seqused_k is not None, "seqused_k must be provided if block_table is"
    if fa_version != 3:
        _other_version(fa_version, s_aux, num_splits)
    assert alibi_slopes is None, "Alibi is not supported in FA3"
    if mask_mod is not None or aux_tensors is not None:
        raise NotImplementedError("FA3 does not support mask_mod or aux_tensors")
    upstream.refuse_unknown(cp=cp_world_size != 1, dropout_p=dropout_p, output_scale=output_scale)
    call = Forward(
        q=upstream.contiguous(q), k=upstream.contiguous(k), v=upstream.contiguous(v), qv=q_v, out=out,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        page_table=block_table, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        softmax_scale=upstream.scale_of(softmax_scale, q, None), causal=causal,
        window=window_size or (-1, -1), softcap=softcap, metadata=scheduler_metadata, num_splits=num_splits,
        sinks=s_aux,
    )  # fmt: skip
    out, lse = forward(call, _BUILD)[:2]
    return (out, lse) if return_softmax_lse else out


def _other_version(fa_version: int, sinks: Tensor | None, num_splits: int) -> NoReturn:
    if fa_version == 2 and sinks is not None:
        raise NotImplementedError("FA2 does not support s_aux")
    if fa_version == 2 and num_splits > 1:
        raise NotImplementedError("FA2 does not support num_splits > 1")
    raise EmulationError("a FlashAttention version in vllm's bundle", asked=fa_version, allowed="3")


def get_scheduler_metadata(
    batch_size: Any, max_seqlen_q: Any, max_seqlen_k: Any, num_heads_q: Any, num_heads_kv: Any, headdim: Any,
    cache_seqlens: Any, qkv_dtype: Any = torch.bfloat16, headdim_v: Any = None, cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None, cache_leftpad: Any = None, page_size: Any = None, max_seqlen_k_new: Any = 0,
    causal: Any = False, window_size: Any = (-1, -1), has_softcap: Any = False, num_splits: Any = 0,
    pack_gqa: Any = None, sm_margin: Any = 0,
) -> Tensor:  # fmt: skip
    """vllm: no `attention_chunk`, so what follows the window shifts by one place."""
    return upstream.get_scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype,
        headdim_v, cu_seqlens_q, cu_seqlens_k_new, cache_leftpad, page_size, max_seqlen_k_new, causal,
        window_size, 0, has_softcap, num_splits, pack_gqa, sm_margin,
    )  # fmt: skip
