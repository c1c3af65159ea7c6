"""Fakes of FlashAttention's builds that note what they are called with, and steps to call them by."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

import anyattn
from anyattn.testing.emulators import emulating
from anyattn.testing.selecting import select_for

TOKENSPEED = "cuda:sm90-sglang-kernel-vllm"
SGLANG = "cuda:sm90-vllm-tokenspeed-fa3"
VLLM = "cuda:sm90-sglang-kernel-tokenspeed-fa3"

OPERATOR = (
    "q", "k", "v", "k_new", "v_new", "q_v", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new",
    "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k",
    "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "softmax_scale",
    "is_causal", "window_size_left", "window_size_right", "attention_chunk", "softcap",
    "is_rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin", "sinks",
)  # fmt: skip
"""Arguments of `flash_attn_3::fwd`, from the schema in tokenspeed-fa3 3.0.0.post20260810."""


@dataclass
class Calls:
    """What a function was called with, in order."""

    seen: list[dict[str, Any]] = field(default_factory=list)

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its own signature, noting every call."""
        signature = inspect.signature(function)

        def watched(*args: Any, **given: Any) -> Any:
            self.seen.append(dict(signature.bind(*args, **given).arguments))
            return function(*args, **given)

        watched.__signature__ = signature  # type: ignore[attr-defined]
        return watched


@contextmanager
def watched(name: str, host: str, module: str) -> Iterator[tuple[Calls, Calls, Calls]]:
    """Stand-ins of `name` whose paged, ragged and scheduling functions note their calls."""
    with emulating(name, host):
        found = sys.modules[module]
        vars(found).pop("flash_attn_3_gpu", None)  # the Python functions are to be called
        notes = Calls(), Calls(), Calls()
        names = ("flash_attn_with_kvcache", "flash_attn_varlen_func", "get_scheduler_metadata")
        for attribute, calls in zip(names, notes, strict=True):
            if hasattr(found, attribute):
                setattr(found, attribute, calls.watch(getattr(found, attribute)))
        yield notes


def operator(calls: Calls) -> SimpleNamespace:
    """A `flash_attn_3_gpu` whose `fwd` writes ones, as the compiled operator has it."""

    def fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
        calls.seen.append(given)
        out = given.get("out")
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype) if out is None else out
        return out.fill_(1), torch.zeros(q.shape[1], q.shape[0]), None, None

    fwd._schema = SimpleNamespace(arguments=[SimpleNamespace(name=n) for n in OPERATOR])  # type: ignore[attr-defined]
    return SimpleNamespace(fwd=SimpleNamespace(default=fwd))


def backend_of(name: str, host: str, specs: Sequence[anyattn.AttentionSpec], **options: Any) -> Any:
    """A backend of bf16 layers with pages of 16, for 8 requests of up to 128 tokens."""
    limits = anyattn.Limits(max_requests=8, max_tokens=64, max_context=128, max_draft_tokens=8)
    decision = select_for(
        specs, device="cpu", host=host, dtype=torch.bfloat16, backend=name, page_size=16, limits=limits,
        **options,
    )  # fmt: skip
    pool = anyattn.kv.create_pool(decision, num_slots=64 * 16)
    table = anyattn.kv.RequestTable(max_requests=8, max_context=128, device="cpu")
    for row in range(8):
        table.req_to_token[row] = 16 + row * 128 % 1024 + torch.arange(128, dtype=torch.int32)
    return anyattn.create_backend(decision, pool, table)


def spec(**options: Any) -> anyattn.AttentionSpec:
    """Four query heads, two KV heads of 64."""
    return anyattn.AttentionSpec(**{"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, **options})


def attend(
    backend: Any, batch: anyattn.ForwardBatch, layers: Sequence[anyattn.AttentionLayer], *,
    given: bool = True, **options: Any,
) -> list[Any]:  # fmt: skip
    """Outputs of layers 0 .. of one step on random q, k and v (`given`: k and v are passed)."""
    plan = backend.init_forward_metadata(batch)
    outs = []
    with anyattn.forward_context(backend, plan):
        for layer in layers:
            s = layer.spec
            q, k, v = (
                torch.randn(batch.num_tokens, heads, 64).to(torch.bfloat16)
                for heads in (s.num_q_heads, s.num_kv_heads, s.num_kv_heads)
            )
            outs.append(layer(q, *((k, v) if given else (None, None)), batch, **options))
    return outs


def slots(row: int, start: int, count: int) -> list[int]:
    """Slots of `count` tokens of a request, from position `start`."""
    return list(range(16 + row * 128 + start, 16 + row * 128 + start + count))


def decode(count: int, length: int = 40) -> anyattn.ForwardBatch:
    """A step of `count` requests of `length` tokens each."""
    new = [slots(row, length - 1, 1)[0] for row in range(count)]
    return anyattn.ForwardBatch.decode(list(range(count)), [length] * count, new)


def extend(prefix: int, new: int, **options: Any) -> anyattn.ForwardBatch:
    """One request that grows from `prefix` by `new` tokens."""
    return anyattn.ForwardBatch.extend([0], [prefix], [new], slots(0, prefix, new), **options)
