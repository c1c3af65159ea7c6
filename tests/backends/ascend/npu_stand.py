"""A small torch_npu for tests of the adapter: notes calls, checks them by schema, attends in float64.

Schemas are those of torch-npu 2.13.0 (`torch_npu_schemas.json`). The kit's stand-in of the library is
`anyattn.testing.emulators`, by another hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from anyattn.core.graph.host_arguments import last_noted
from anyattn.core.graph.recorder import record_call

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "torch_npu_schemas.json").read_text())
SCHEMAS: dict[str, str] = RECORDED["schemas"]
Shapes = Callable[[str, Mapping[str, Any]], tuple[torch.Size, torch.Size]]
"""Name and bound arguments of a fused call -> shapes of its two results."""


def bind(schema_text: str, args: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with defaults. Raises `TypeError` as the dispatcher would."""
    schema = torch._C.parse_schema(schema_text)
    names = [a.name for a in schema.arguments]
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    if len(args) > len(positional):
        raise TypeError(f"{schema.name}: {len(args)} positional arguments")
    bound = dict(zip(positional, args, strict=False)) | dict(given)
    for name in bound:
        if name not in names:
            raise TypeError(f"{schema.name}() got an unexpected keyword argument {name!r}")
    for argument in schema.arguments:
        if argument.name not in bound:
            if not argument.has_default_value():
                raise TypeError(f"{schema.name}() is missing {argument.name!r}")
            bound[argument.name] = argument.default_value
        _check_type(schema.name, argument, bound[argument.name])
    return bound


def _check_type(name: str, argument: Any, value: Any) -> None:
    text = str(argument.type)
    fits = {
        "Tensor": isinstance(value, torch.Tensor),
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, float),
        "bool": isinstance(value, bool),
        "str": isinstance(value, str),
    }
    kind = text.removeprefix("Optional[").removesuffix("]")
    if value is None:
        ok = text.startswith("Optional[")
    elif kind.startswith("List["):
        ok = isinstance(value, (list, tuple)) and all(type(x) is int for x in value)
    else:
        ok = fits.get(kind, False)
    if not ok:
        raise TypeError(f"{name}({argument.name}={type(value).__name__}): {text} is wanted")


@dataclass
class Calls:
    """`(operator, arguments)` of every call, in order."""

    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def last(self, name: str) -> dict[str, Any]:
        """Arguments of the last call of an operator."""
        return next(given for called, given in reversed(self.seen) if called == name)


@contextmanager
def standing(shapes: Shapes | None = None) -> Iterator[Calls]:
    """`torch_npu` in `sys.modules`. With `shapes`, results are zeros of those shapes instead of attention."""
    calls = Calls()
    module = ModuleType("torch_npu")
    for version in ("", "_v2"):
        name = f"npu_fused_infer_attention_score{version}"
        setattr(module, name, _fused(name, calls, shapes))
    module._npu_paged_attention = _paged("_npu_paged_attention", calls)  # type: ignore[attr-defined]
    module._npu_paged_attention_splitfuse = _paged("_npu_paged_attention_splitfuse", calls)  # type: ignore[attr-defined]
    module.npu_format_cast = lambda x, kind: bind(SCHEMAS["npu_format_cast"], (x, kind), {})["input"]  # type: ignore[attr-defined]
    before = sys.modules.get("torch_npu")
    sys.modules["torch_npu"] = module
    try:
        yield calls
    finally:
        del sys.modules["torch_npu"]
        if before is not None:
            sys.modules["torch_npu"] = before


# -- fused infer attention -------------------------------------------------------------------------------


def _fused(name: str, calls: Calls, shapes: Shapes | None) -> Callable[..., Any]:
    second = name.endswith("_v2")
    q_lens, kv_lens = (
        ("actual_seq_qlen", "actual_seq_kvlen") if second else ("actual_seq_lengths", "actual_seq_lengths_kv")
    )
    lse = "return_softmax_lse" if second else "softmax_lse_flag"

    def operator(*args: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        bound = bind(SCHEMAS[name], args, given)
        calls.seen.append((name, bound))
        for value in bound.values():
            assert not isinstance(value, torch.Tensor) or value.is_contiguous()
        if shapes is not None:
            sizes = shapes(name, bound)
            q = bound["query"]
            return torch.zeros(sizes[0], dtype=q.dtype), torch.zeros(sizes[1])
        out, sums = (torch.empty(s) for s in fused_shapes(bound, lse))
        out = out.to(bound["query"].dtype)
        constants = {k: v for k, v in bound.items() if not isinstance(v, torch.Tensor)}
        tensors = {k: v for k, v in bound.items() if isinstance(v, torch.Tensor)}
        source = last_noted()

        def compute(out: torch.Tensor, sums: torch.Tensor, *values: torch.Tensor) -> None:
            now = constants | dict(zip(tensors, values, strict=True)) | (dict(source()) if source else {})
            _attend_fused(now, q_lens, kv_lens, out, sums)

        record_call(compute, (out, sums, *tensors.values()), name)
        return out, sums

    return operator


def fused_shapes(bound: Mapping[str, Any], lse: str) -> tuple[torch.Size, torch.Size]:
    """Shapes of both results, as the library's documents give them."""
    q, value = bound["query"], bound["value"]
    if bound["block_table"] is None or value.dim() == 4:
        size = value.shape[-1]
    elif value.dim() == 3:
        size = value.shape[2] // bound["num_key_value_heads"]
    else:
        size = value.shape[2] * value.shape[4]
    out = torch.Size((*q.shape[:-1], size))
    if not bound[lse]:
        return out, torch.Size((0,))
    if bound["input_layout"] == "TND":
        return out, torch.Size((*q.shape[:2], 1))
    heads = q.shape[2] if bound["input_layout"] == "BSND" else q.shape[1]
    return out, torch.Size((q.shape[0], heads, 1, 1))


def _attend_fused(
    bound: Mapping[str, Any], q_name: str, kv_name: str, out: torch.Tensor, sums: torch.Tensor
) -> None:
    heads = bound["num_query_heads" if q_name == "actual_seq_qlen" else "num_heads"]
    scale = bound["softmax_scale" if q_name == "actual_seq_qlen" else "scale"]
    layout, table = bound["input_layout"], bound["block_table"]
    q = (
        bound["query"]
        if layout == "TND"
        else bound["query"].flatten(0, 2).view(-1, heads, bound["query"].shape[-1])
    )
    q_ends = bound[q_name] if layout == "TND" else list(range(1, q.shape[0] + 1))
    keys, values = bound["key"], bound["value"]
    if bound["query_rope"] is not None:
        q = torch.cat((q, bound["query_rope"]), dim=-1)
    assert q.shape[1] == heads
    assert q_ends[-1] == q.shape[0], "TND wants the last length to be T"
    assert len(bound[kv_name]) == len(q_ends)
    flat, flat_sums = out.view(q.shape[0], heads, -1), sums.view(-1, heads) if sums.numel() else None
    start = key_start = 0
    for index, end in enumerate(q_ends):
        if table is None:
            rows = slice(key_start, bound[kv_name][index])
            k, v, key_start = keys[rows], values[rows], bound[kv_name][index]
        else:
            count, page = bound[kv_name][index], bound["block_size"]
            pages = table[index, : -(-count // page)].long()
            k, v = (_listed(c, bound["num_key_value_heads"], page, pages)[:count] for c in (keys, values))
            if bound["key_rope"] is not None:
                k = torch.cat((k, _listed(bound["key_rope"], 1, page, pages)[:count]), dim=-1)
        sink = bound.get("learnable_sink")
        answer, lse = attend(q[start:end], k, v, scale, _hidden(end - start, k.shape[0], bound), sink)
        flat[start:end] = answer.to(out.dtype)
        if flat_sums is not None:
            flat_sums[start:end] = lse.float()
        start = end


def _listed(cache: torch.Tensor, heads: int, page: int, pages: torch.Tensor) -> torch.Tensor:
    """`[n, Hkv, D]` of the pages of a cache in any of its three forms."""
    if cache.dim() == 3:
        rows = cache.view(cache.shape[0], page, heads, -1)
    elif cache.dim() == 4:
        rows = cache.transpose(1, 2)
    else:
        rows = cache.permute(0, 3, 1, 2, 4).flatten(3)
    return rows[pages].flatten(0, 1)


def _hidden(queries: int, keys: int, bound: Mapping[str, Any]) -> torch.Tensor | None:
    """True = hidden; modes 3 and 4 stand at the last key."""
    mode = bound["sparse_mode"]
    if mode == 0:
        assert bound["atten_mask"] is None
        return None
    assert torch.equal(bound["atten_mask"].bool(), torch.ones(2048, 2048).triu(1).bool())
    i = torch.arange(queries)[:, None] + (keys - queries)
    j = torch.arange(keys)[None, :]
    if mode == 3:
        return j > i
    assert mode == 4
    band: torch.Tensor = (j > i + bound["next_tokens"]) | (j < i - bound["pre_tokens"])
    return band


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    hidden: torch.Tensor | None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and natural-log sums in float64; a query without keys: 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    logits = torch.einsum("nhd,mhd->nhm", q.double(), k.double().repeat_interleave(group, 1)) * scale
    if hidden is not None:
        logits = logits.masked_fill(hidden[:, None, :], -torch.inf)
    lse = torch.logsumexp(logits, -1) if k.shape[0] else torch.full(q.shape[:2], -torch.inf).double()
    weights = torch.exp(logits - lse.nan_to_num(neginf=0.0)[..., None])
    out = torch.einsum("nhm,mhd->nhd", weights, v.double().repeat_interleave(group, 1))
    return (out if sink is None else out * torch.sigmoid(lse - sink.double())[..., None]), lse


# -- ATB's operators -------------------------------------------------------------------------------------


def _paged(name: str, calls: Calls) -> Callable[..., None]:
    def operator(**given: Any) -> None:
        bound = bind(RECORDED["described"][name], (), given)
        calls.seen.append((name, bound))
        q, out, heads = bound["query"], bound["out"], bound["num_kv_heads"]
        assert q.dtype == torch.float16
        assert out.is_contiguous()
        lens = [1] * q.shape[0] if "seq_len" not in bound else bound["seq_len"].tolist()
        start = 0
        for index, new in enumerate(lens):
            count = int(bound["context_lens"][index])
            page = bound["key_cache"].shape[2]
            pages = bound["block_table"][index, : -(-count // page)].long()
            k, v = (_tiles(bound[c], heads, pages)[:count] for c in ("key_cache", "value_cache"))
            hidden = None
            if "mask" in bound:
                rows = bound["mask"][0].permute(1, 0, 2).flatten(1)
                hidden = rows[start : start + new, :count].isneginf()
            answer, _ = attend(q[start : start + new], k, v, bound["scale_value"], hidden)
            out[start : start + new] = answer.to(out.dtype)
            start += new

    return operator


def _tiles(cache: torch.Tensor, heads: int, pages: torch.Tensor) -> torch.Tensor:
    """`[n, Hkv, D]` out of `[pages, Hkv * D / 16, P, 16]`."""
    listed = cache[pages]
    split = listed.view(listed.shape[0], heads, listed.shape[1] // heads, *listed.shape[2:])
    return split.permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)
