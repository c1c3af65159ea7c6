"""FlexAttention's adapter on a CPU: the judge's cases, the paged form, masks once a step, few compiles."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import anyattn
from anyattn.backends.portable import flex_attention, flex_kernel
from anyattn.backends.portable.flex_attention import FlexAttention
from anyattn.core.plan import TableForm, TableKind
from anyattn.testing.builder import build_step
from anyattn.testing.cases import Case, CaseSpace, random_cases
from anyattn.testing.judge import check_case, judge, run_step
from anyattn.testing.world import World

_SPACE = CaseSpace(
    kinds=("causal", "causal", "bidirectional", "encoder_only"),
    heads=((4, 2),),
    head_dims=((16, 16), (24, 8)),
    windows=(None, 5),
    caps=(None, 1.5),
    masks=(None,),
    kv_scales=(1.0, 0.5),
    max_context=48,
)


@pytest.mark.parametrize("case", list(random_cases(11, 14, _SPACE)), ids=lambda c: f"{c.mode}-{c.kind}")
def test_gathered_matches_the_oracle(case: Case) -> None:
    report = check_case(case, backend="flex_attention")
    assert report.passed, str(report)


def _paged(world: World, page: int) -> FlexAttention:
    """The backend of a world again, on the form that only GPUs are offered. Storage becomes finite: eager
    kernels multiply what they mask by zero."""
    for cache in (world.pool.key_cache(0), world.pool.value_cache(0)):
        cache.nan_to_num_(nan=37.0)
    form = TableForm(TableKind.BLOCK_TABLE, kernel_page=page)
    return FlexAttention(dataclasses.replace(world.backend.config, form=form))


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize(
    ("kind", "mode"), [("causal", "decode"), ("causal", "mixed"), ("bidirectional", "extend")]
)
def test_paged_form_reads_the_pool_in_place(window: int | None, kind: str, mode: str) -> None:
    ends = {"decode": (1, 1, 1), "mixed": (150, 0, 1), "extend": (150, 1, 40)}[mode]
    case = Case(
        mode=mode, kind=kind, prefix_lens=(3, 47, 90), extend_lens=ends, num_decode=int(mode == "mixed"),
        page_size=32, slot_layout="shuffled_pages", num_q_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=32,
        window=window, sinks=True, logit_cap=30.0, seed=5,
    )  # fmt: skip
    world = World(case, backend="flex_attention")
    world.backend = _paged(world, 16)
    report = judge(run_step(build_step(world)))
    assert report.passed, str(report)


def test_a_page_of_two_requests_counts_once_in_each() -> None:
    case = Case(prefix_lens=(40, 40), extend_lens=(3, 20), page_size=16, head_dim=16, v_head_dim=16, seed=3)
    world = World(case, backend="flex_attention")
    shared = world.slots[0][:32]
    world.slots[1][:32] = shared
    world.table.req_to_token[world.rows[1], :32] = shared.int()
    world.backend = _paged(world, 16)
    report = judge(run_step(build_step(world)))
    assert report.passed, str(report)


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "decode", "extend_lens": (1, 1), "num_q_heads": 72},
        {"mode": "decode", "extend_lens": (1, 1), "num_q_heads": 3},
        {"mode": "extend", "extend_lens": (200, 3)},
        {"mode": "extend", "extend_lens": (200, 3), "kind": "bidirectional"},
        {"mode": "extend", "extend_lens": (300, 3), "kind": "encoder_only", "kv": "arguments"},
    ],
)
@pytest.mark.parametrize("paged", [True, False])
def test_lists_reach_as_far_as_queries_and_keys(
    fields: dict[str, Any], paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled kernels read a row of the lists for each block of queries, whatever was allocated."""
    given: list[tuple[Any, tuple[int, int], tuple[int, int]]] = []
    original = flex_attention.block_mask
    monkeypatch.setattr(flex_attention, "block_mask", lambda *a: given.append(a) or original(*a))
    prefix = (0, 0) if fields.get("kind") == "encoder_only" else (40, 5)
    case = Case(prefix_lens=prefix, page_size=16, head_dim=16, v_head_dim=16, return_lse=False, **fields)
    if paged and case.kind == "encoder_only":
        pytest.skip("encoder-only layers have no pages")
    world = World(case, backend="flex_attention")
    world.backend = _paged(world, 16) if paged else world.backend
    assert judge(run_step(build_step(world))).passed
    ((blocks, size, lengths),) = given
    for counts, entries in (blocks.partial, blocks.full):
        assert counts.shape[2] * size[0] >= lengths[0]
        assert entries.shape[:3] == counts.shape
        assert int(counts.max()) <= entries.shape[3]
        listed = entries[torch.arange(entries.shape[3]) < counts[..., None]]
        assert not listed.numel() or int(listed.max()) * size[1] < lengths[1]


def test_masks_are_made_once_a_step_for_each_plan_group(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = flex_attention.block_lists
    monkeypatch.setattr(flex_attention, "block_lists", lambda *a: made.append(a) or original(*a))
    specs = [
        anyattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=8, sliding_window=w)
        for w in (None, 4, None)
    ]
    limits = anyattn.Limits(max_requests=4, max_tokens=64, max_context=64)
    decision = anyattn.select(
        specs, dtype=torch.float32, device="cpu", backend="flex_attention", page_size=1, limits=limits
    )
    pool = anyattn.kv.create_pool(decision, num_slots=64)
    table = anyattn.kv.RequestTable(max_requests=4, max_context=64, device="cpu")
    backend = anyattn.create_backend(decision, pool, table)
    table.req_to_token[0, :9] = torch.arange(1, 10, dtype=torch.int32)
    batch = anyattn.ForwardBatch.extend(
        [0], prefix_lens=[0], extend_lens=[9], out_cache_loc=list(range(1, 10))
    )
    plan = backend.init_forward_metadata(batch)
    assert len(made) == 2
    q, kv = torch.randn(9, 2, 8), torch.randn(9, 1, 8)
    with anyattn.forward_context(backend, plan):
        outs = [anyattn.AttentionLayer(spec, i)(q, kv, kv, batch) for i, spec in enumerate(specs)]
    assert len(made) == 2
    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], outs[1])


def test_other_lengths_and_batches_compile_next_to_nothing() -> None:
    rng = random.Random(7)
    flex_kernel.compiled.cache_clear()
    before = counters["stats"]["unique_graphs"]
    for turn in range(14):
        count = rng.randint(1, 6)
        prefix = tuple(rng.randint(0, 300) for _ in range(count))
        extend = (1,) * count if turn % 2 else tuple(rng.randint(1, 40) for _ in range(count))
        mode = "decode" if turn % 2 else "extend"
        case = Case(
            mode=mode,
            prefix_lens=prefix,
            extend_lens=extend,
            num_q_heads=2,
            head_dim=16,
            v_head_dim=16,
            seed=turn,
        )
        assert check_case(case, backend="flex_attention").passed
    # Two functions (decode, extend), each for one request and for several.
    assert counters["stats"]["unique_graphs"] - before <= 6


@pytest.mark.parametrize("paged", [True, False])
def test_where_kernels_are_compiled_any_batch_window_and_scale_shares_one(paged: bool) -> None:
    """With the tiles that a GPU gets: one request, as many requests as heads, windows, kinds and scales."""
    flex_kernel.compiled.cache_clear()
    before = counters["stats"]["unique_graphs"]
    turns: list[tuple[int, int | None, float | None, str]] = [
        (3, None, None, "causal"), (1, None, None, "causal"), (4, 5, None, "causal"),
        (2, None, 0.3, "causal"), (5, 40, None, "bidirectional"), (1, 5, 0.3, "bidirectional"),
    ]  # fmt: skip
    for seed, (count, window, scale, kind) in enumerate(turns):
        case = Case(
            prefix_lens=(37, 0, 5, 90, 2)[:count], extend_lens=(3, 20, 1, 17, 9)[:count], kind=kind,
            num_q_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16, page_size=16, window=window,
            scale=scale, seed=seed,
        )  # fmt: skip
        world = World(case, backend="flex_attention")
        world.backend = backend = _paged(world, 16) if paged else world.backend
        assert isinstance(backend, FlexAttention)
        backend._least = 2
        report = judge(run_step(build_step(world)))
        assert report.passed, str(report)
    assert flex_kernel.compiled.cache_info().currsize == 1
    assert counters["stats"]["unique_graphs"] - before == 1


def test_declares_no_graph_and_ends_its_reads_with_planning() -> None:
    world = World(Case(prefix_lens=(4,), extend_lens=(2,)), backend="flex_attention")
    traits = world.backend.traits(anyattn.ForwardMode.EXTEND)
    assert traits.graph.name == "NEVER"
    assert traits.shared_read_ends.name == "IN_REPLAY"
    assert world.backend.traits(anyattn.ForwardMode.DECODE).host_lengths.name == "BOUND"


def test_source_has_no_device_named() -> None:
    for module in (flex_attention, flex_kernel):
        text = Path(str(module.__file__)).read_text(encoding="utf-8")
        assert '"cuda"' not in text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("blocks", [(16, 16), (16, 128), (128, 32), (128, 128)])
def test_tiles_divide_the_blocks_of_the_mask_and_fit(
    dtype: torch.dtype, dim: int, blocks: tuple[int, int]
) -> None:
    spec = flex_kernel.Specialisation((8, 2, dim, dim), dtype, False, True, "cuda", blocks)
    options = flex_kernel.kernel_options(spec)
    assert options is not None
    rows, keys, stages = (options[name] for name in ("BLOCK_M", "BLOCK_N", "num_stages"))
    assert blocks[0] % rows == 0
    assert blocks[1] % keys == 0
    assert min(rows, keys) >= 16
    assert (rows + 2 * keys * stages) * dim * dtype.itemsize <= 99 << 10
    assert flex_kernel.kernel_options(dataclasses.replace(spec, device="cpu")) is None
