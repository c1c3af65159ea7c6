"""What a step gives to FlexAttention's kernel, as the kernel of torch 2.11 to 2.14 reads it on a GPU.

Nothing there checks an index. On a CPU the same call is eager and never looks at the lists, so a list that
reaches too far would first be seen as an illegal address.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anyattn.backends.portable import flex_attention
from anyattn.backends.portable.flex_kernel import Kernel, Specialisation
from anyattn.testing.builder import build_step
from anyattn.testing.cases import Case
from anyattn.testing.judge import run_step
from anyattn.testing.world import World

HOST = "cuda:sm90"
HALF: dict[str, Any] = {"dtype": "float16", "kv_dtype": "float16", "head_dim": 64, "v_head_dim": 64}
FP8: dict[str, Any] = HALF | {"kv_dtype": "float8_e4m3fn", "k_scale": 2.0, "v_scale": 0.25}
CASES = {
    "as it once failed": Case(
        mode="decode", prefix_lens=(1, 0), extend_lens=(1, 1), page_size=128, slot_layout="interleaved",
        num_q_heads=64, window=1, logit_cap=1.5, sinks=True, kv="arguments", device_ints=True, padding=2,
        **FP8,
    ),
    "one request": Case(mode="decode", prefix_lens=(63,), extend_lens=(1,), page_size=64, **HALF),
    "paged decode": Case(
        mode="decode", prefix_lens=(127, 0, 300, 128), extend_lens=(1,) * 4, page_size=32, num_q_heads=34,
        num_kv_heads=2, slot_layout="shuffled_pages", padding=3, **HALF,
    ),
    "paged window": Case(
        mode="decode", prefix_lens=(127, 0, 300), extend_lens=(1,) * 3, page_size=64, num_q_heads=4,
        num_kv_heads=2, window=65, slot_layout="non_monotonic", **HALF,
    ),
    "paged prefill": Case(
        prefix_lens=(0, 200, 31), extend_lens=(150, 1, 129), page_size=32, num_q_heads=4, num_kv_heads=2,
        window=40, logit_cap=30.0, **HALF,
    ),
    "gathered prefill": Case(
        prefix_lens=(0, 200, 31), extend_lens=(150, 0, 129), page_size=4, num_q_heads=4, num_kv_heads=2,
        padding=4, **FP8,
    ),
    "mixed": Case(
        mode="mixed", prefix_lens=(5, 140, 9), extend_lens=(20, 1, 1), num_decode=2, page_size=1,
        window=17, **FP8,
    ),
    "bidirectional": Case(
        kind="bidirectional", prefix_lens=(130, 0), extend_lens=(7, 40), page_size=16, window=30, **HALF
    ),
    "encoder": Case(kind="encoder_only", prefix_lens=(0, 0), extend_lens=(7, 140), kv="arguments", **HALF),
    "chains": Case(mode="verify", prefix_lens=(130, 2), extend_lens=(3, 3), page_size=128, **HALF),
}  # fmt: skip
Call = tuple[Specialisation, tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Arguments of each call; batches of one are avoided as on a GPU."""
    seen: list[Call] = []
    made, make = flex_attention.compiled, flex_attention.FlexAttention.__init__

    def compiled(spec: Specialisation) -> Kernel:
        kernel = made(spec)

        def call(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append((spec, arguments))
            return kernel(*arguments)

        return call

    def init(self: Any, config: Any) -> None:
        make(self, config)
        self._least = 2

    monkeypatch.setattr(flex_attention, "compiled", compiled)
    monkeypatch.setattr(flex_attention.FlexAttention, "__init__", init)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_no_index_of_a_step_leaves_its_tensor(calls: list[Call], name: str) -> None:
    world = World(CASES[name], backend="flex_attention", host=HOST)
    run_step(build_step(world))
    assert calls
    for spec, arguments in calls:
        assert not list(faults(spec, *arguments)), spec
    paged = "pages" in _captured(calls[0][1][3].mask_mod)
    assert paged == (name.startswith(("paged", "one", "bidir", "chains"))), "both forms are among the cases"


@pytest.mark.parametrize("harm", ["index", "count", "narrow", "negative", "apart", "strided"])
def test_harm_to_an_argument_is_seen(calls: list[Call], harm: str) -> None:
    run_step(build_step(World(CASES["paged decode"], backend="flex_attention", host=HOST)))
    spec, (q, k, v, mask, scales, caps) = calls[0]
    partial, full = mask.kv_indices.clone(), mask.full_kv_indices
    counts, mod = mask.kv_num_blocks.clone(), mask.mask_mod
    if harm == "index":
        partial[1, 0, 0, 0] = -(-k.shape[2] // spec.blocks[1])
        counts[1] = 1
    elif harm == "count":
        counts[0] = partial.shape[3] + 1
    elif harm == "narrow":
        low = _captured(mod)["low"]
        mod = _with(mod, low=low[:, : low.shape[1] // 2].contiguous())
    elif harm == "negative":
        partial[0, 0, 0, 0] = -1
    elif harm == "apart":
        full = full[:, :, :, :-1].contiguous()
    else:
        partial = torch.stack((partial, partial), -1)[..., 0]
    harmed = SimpleNamespace(
        kv_num_blocks=counts, kv_indices=partial, mask_mod=mod,
        full_kv_num_blocks=mask.full_kv_num_blocks, full_kv_indices=full,
    )  # fmt: skip
    assert not list(faults(spec, q, k, v, mask, scales, caps))
    assert list(faults(spec, q, k, v, harmed, scales, caps))


def faults(
    spec: Specialisation, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scales: torch.Tensor,
    caps: torch.Tensor | None,
) -> Iterator[str]:  # fmt: skip
    """What the kernel would read beside its arguments: `q [N, H, rows, D]`, `k`, `v [N or 1, Hkv, S, ..]`."""
    tiles, heads, rows, _ = q.shape
    if tiles < 2 or k.shape[0] not in (1, tiles) or v.shape[:3] != k.shape[:3]:
        yield f"batches of {q.shape[0]} and {k.shape[0]}"
    if any(x is not None and x.shape != (heads,) for x in (scales, caps)):
        yield "a scale and a cap for each head"
    spans, blocks = -(-rows // spec.blocks[0]), -(-k.shape[2] // spec.blocks[1])
    if mask.kv_indices.shape != mask.full_kv_indices.shape:
        yield "torch 2.11 finds the full list's rows by the other list's strides"
    for counts, entries in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        if not (counts.is_contiguous() and entries.is_contiguous()):
            yield "rows of a list are found as if it were contiguous"
        if counts.shape[0] != tiles or entries.shape[:3] != counts.shape or counts.shape[2] < spans:
            yield f"lists {tuple(entries.shape)} for {tiles} tiles of {spans} spans"
        if not 0 <= int(counts.min()) <= int(counts.max()) <= entries.shape[3]:
            yield "more blocks than the list has room for"
        # The first entry is read even of an empty list, and the others are multiplied into addresses.
        used = torch.arange(entries.shape[3]) < counts[..., None].clamp_min(1)
        if int(entries[used].min()) < 0 or int(entries[used].max()) >= blocks:
            yield f"a block of keys beside the {blocks} that there are"
    captured = _captured(mask.mask_mod)
    for bound in (captured["low"], captured["high"]):
        if bound.shape[0] < tiles or bound.shape[1] < rows or not bound.is_contiguous():
            yield f"bounds {tuple(bound.shape)} for {tiles} tiles of {rows} rows"
    if "pages" in captured:
        request, pages = captured["request"], captured["pages"]
        if request.shape[0] < tiles or int(request.min()) < 0 or int(request.max()) >= pages.shape[0]:
            yield "a tile of a request without pages"
        if pages.shape[1] * captured["page"] < k.shape[2]:
            yield f"{pages.shape[1]} pages of {captured['page']} for {k.shape[2]} slots"


def _captured(function: Any) -> dict[str, Any]:
    """What a function has captured, by name."""
    cells = (cell.cell_contents for cell in function.__closure__)
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


def _with(function: Any, **changed: Any) -> Any:
    """The function on other captured values."""
    cells = tuple(types.CellType(value) for value in (_captured(function) | changed).values())
    return types.FunctionType(function.__code__, function.__globals__, closure=cells)
