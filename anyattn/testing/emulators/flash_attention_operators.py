"""Stand-ins for the operators that tokenspeed-fa3 registers, `torch.ops.flash_attn_3`, by their schemas."""

from __future__ import annotations

from typing import Any

import torch

from anyattn.testing.emulators.flash_attention import (
    TOKENSPEED,
    get_scheduler_metadata,
    refuse_unknown,
    scale_of,
)
from anyattn.testing.emulators.flash_attention_3 import forward
from anyattn.testing.emulators.flash_attention_call import Forward

__all__ = ["ForwardOperator", "SchedulerOperator"]

Tensor = torch.Tensor
_SCHEMA = (
    "flash_attn_3::fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, "
    "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, "
    "int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, "
    "Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, "
    "int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, float softcap=0.0, "
    "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
    "bool? pack_gqa=None, int sm_margin=0, Tensor? sinks=None) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
"""Of the operator, as the compiled library of tokenspeed-fa3 registers it."""

_SCHEDULER_SCHEMA = (
    "flash_attn_3::get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, "
    "int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? leftpad_k=None, int? page_size=None, int max_seqlen_k_new=0, "
    "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, "
    "bool has_softcap=False, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> Tensor"
)
"""The same library's."""

_FORWARDED = (
    "q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "max_seqlen_q",
    "max_seqlen_k", "page_table", "q_descale", "k_descale", "v_descale", "softcap", "pack_gqa", "sinks",
)  # fmt: skip

_SCHEDULER_NAMES = {
    "num_heads": "num_heads_q",
    "num_heads_k": "num_heads_kv",
    "seqused_k": "cache_seqlens",
    "leftpad_k": "cache_leftpad",
    "is_causal": "causal",
}


class _Operator:
    """`torch.ops.flash_attn_3.…`: arguments by its schema, no wrapper's copies or defaults around it."""

    def __init__(self, schema: str) -> None:
        self._schema = torch._C.parse_schema(schema)
        self.default = self

    def _named(self, args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
        names = [argument.name for argument in self._schema.arguments]
        unknown = sorted(set(given) - set(names))
        if unknown or len(args) > len(names):
            raise RuntimeError(f"{self._schema.name}() Unknown keyword argument {unknown}")
        return given | dict(zip(names, args, strict=False))


class ForwardOperator(_Operator):
    """`fwd`."""

    def __init__(self) -> None:
        super().__init__(_SCHEMA)

    def __call__(self, *args: Any, **given: Any) -> tuple[Tensor, ...]:
        given = self._named(args, given)
        for name in (
            "k_new",
            "cu_seqlens_k_new",
            "kv_batch_idx",
            "leftpad_k",
            "rotary_cos",
            "attention_chunk",
        ):
            refuse_unknown(**{name: given.get(name)})
        q, qv = given["q"], given.get("q_v")
        taken = {name: given[name] for name in _FORWARDED if name in given}
        window = given.get("window_size_left", -1), given.get("window_size_right", -1)
        call = Forward(
            softmax_scale=scale_of(given.get("softmax_scale"), q, None), causal=given.get("is_causal", False),
            window=window, qv=qv, metadata=given.get("scheduler_metadata"),
            num_splits=given.get("num_splits", 0), **taken,
        )  # fmt: skip
        return forward(call, TOKENSPEED)


class SchedulerOperator(_Operator):
    """`get_scheduler_metadata`: what the Python function around it passes on, under that function's names."""

    def __init__(self) -> None:
        super().__init__(_SCHEDULER_SCHEMA)

    def __call__(self, *args: Any, **given: Any) -> Tensor:
        given = self._named(args, given)
        refuse_unknown(**{name: given.pop(name, None) for name in ("cu_seqlens_k", "seqused_q")})
        window = given.pop("window_size_left", -1), given.pop("window_size_right", -1)
        for theirs, ours in _SCHEDULER_NAMES.items():
            if theirs in given:
                given[ours] = given.pop(theirs)
        return get_scheduler_metadata(**given, window_size=window)
