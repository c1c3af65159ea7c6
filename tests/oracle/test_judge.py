"""The judge is worth something only if broken backends fail: each mutant here breaks one promise."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from anyattn.backends.reference import attend as kernels
from anyattn.backends.reference import torch_native
from anyattn.core import contract
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.spec import AttentionKind
from anyattn.testing.builder import build_step
from anyattn.testing.cases import Case, CaseSpace, random_cases
from anyattn.testing.judge import Report, check_case, judge, run_step
from anyattn.testing.world import World, place_requests, raw_kv

Mutant = Callable[[pytest.MonkeyPatch], None]
PLAIN = list(random_cases("mutants", 40))
FP8 = list(
    random_cases(
        "fp8", 20, CaseSpace(dtypes=(("float32", "float8_e4m3fn"),), kv_scales=(0.5, 3.0), kinds=("causal",))
    )
)


def wrap(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace `owner.name` by `change(original, *args, **kwargs)`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def window_one_too_wide(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any, spec: Any, *rest: Any) -> Any:
        wider = None if spec.sliding_window is None else spec.sliding_window + 1
        return original(dataclasses.replace(spec, sliding_window=wider), *rest)

    wrap(patch, torch_native, "visible", change)


def causal_forgotten(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        torch_native,
        "visible",
        lambda original, spec, *rest: original(
            dataclasses.replace(spec, kind=AttentionKind.BIDIRECTIONAL), *rest
        ),
    )


def mask_ignored(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, torch_native, "visible", lambda original, spec, q, k, mask: original(spec, q, k, None))


def lse_in_base_two(patch: pytest.MonkeyPatch) -> None:
    def change(
        original: Any,
        q: Any,
        k: Any,
        v: Any,
        spec: Any,
        seen: Any,
        out: Any,
        lse: Any,
        sinks: Any,
        **options: Any,
    ) -> Any:
        original(q, k, v, spec, seen, out, lse, sinks, **options)
        if lse is not None:
            lse.mul_(1 / math.log(2))

    wrap(patch, torch_native, "attend", change)


def sink_ignored(patch: pytest.MonkeyPatch) -> None:
    def change(
        original: Any,
        q: Any,
        k: Any,
        v: Any,
        spec: Any,
        seen: Any,
        out: Any,
        lse: Any,
        sinks: Any,
        **options: Any,
    ) -> Any:
        original(q, k, v, spec, seen, out, lse, None, **options)

    wrap(patch, torch_native, "attend", change)


def heads_of_a_group_mixed_up(patch: pytest.MonkeyPatch) -> None:
    """Query head h reads KV head h % Hkv."""

    def change(original: Any, q: Any, kv_heads: Any) -> Any:
        length, heads, dim = q.shape
        return (
            q.reshape(length, heads // kv_heads, kv_heads, dim).permute(2, 1, 0, 3).reshape(kv_heads, -1, dim)
        )

    wrap(patch, kernels, "_fold", change)


def query_scaled_in_place(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any, q: Any, *rest: Any) -> Any:
        return original(q.mul_(1.0 + 2**-10), *rest)

    wrap(patch, contract, "checked_heads", change)


def written_one_slot_off(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        MHAPool,
        "write",
        lambda original, self, layer, loc, k, v: original(self, layer, loc.roll(1), k, v),
    )


def never_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MHAPool, "write", lambda *args: None)


def one_slot_too_far(patch: pytest.MonkeyPatch) -> None:
    """Reads a neighbour: another request's, or nobody's (NaN)."""

    def change(original: Any, self: Any, layer: Any, slots: Any) -> Any:
        slots = slots.clone()
        if slots.numel():
            slots[-1] += 1
        return original(self, layer, slots.clamp_max(self.total_slots - 1))

    wrap(patch, MHAPool, "gather", change)


def out_not_used(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, contract, "output_like", lambda original, q, spec, out, dtype: original(q, spec, None, dtype))


MUTANTS = [
    window_one_too_wide,
    causal_forgotten,
    mask_ignored,
    lse_in_base_two,
    sink_ignored,
    heads_of_a_group_mixed_up,
    query_scaled_in_place,
    written_one_slot_off,
    never_written,
    one_slot_too_far,
    out_not_used,
]


def test_the_unbroken_backend_passes() -> None:
    for case in (*PLAIN, *FP8):
        report = check_case(case)
        assert report.passed, str(report)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_broken_backend_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert not all(check_case(case).passed for case in PLAIN)


def test_scale_applied_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap(
        monkeypatch,
        torch_native,
        "dequantize",
        lambda original, x, scale: original(original(x, scale), scale),
    )
    assert not any(check_case(case).passed for case in FP8 if case.kv != "arguments" and case.num_tokens)


def test_write_outside_the_step_is_found() -> None:
    world = World(Case(prefix_lens=(5, 3), extend_lens=(2, 1), page_size=4, layout="HND"))
    step = build_step(world)
    original = world.backend.forward_extend

    def forward_extend(call: Any) -> None:
        original(call)
        world.pool.key_cache(0)[1, :, 2] += 1.0  # a slot of the first request's prefix

    world.backend.forward_extend = forward_extend
    assert run_step(step).faults == ("K storage changed at slots that the step doesn't own",)


def test_wrong_shape_and_dtype_are_faults() -> None:
    step = run_step(build_step(World(Case(extend_lens=(3,), num_q_heads=2))))
    assert judge(step).passed
    step.out = step.out.double()
    assert "torch.float64" in judge(step).faults[0]
    step.out = step.out[:, :1]
    assert "(3, 1, 8)" in judge(step).faults[0]


def test_report_prints_the_case_and_names_its_faults() -> None:
    case = Case(prefix_lens=(4,), extend_lens=(2,), window=3)
    report = Report(case, (0.5,), (1e-9,), ("q was modified",))
    assert not report.passed
    assert report.error == 0.5
    assert str(report) == f"error 0.5 (allowed 1e-05) in {case!r}\nq was modified"
    assert not Report(case, (math.nan,), (), ()).passed


# -- the world ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_layout", ["contiguous", "shuffled_pages", "interleaved", "non_monotonic"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_places_are_disjoint_whole_pages(slot_layout: str, page_size: int) -> None:
    lengths = [9, 0, 4, 13]
    slots, pages = place_requests(lengths, page_size, slot_layout, random.Random(0))
    everything = torch.cat(slots)
    assert [len(s) for s in slots] == lengths
    assert everything.unique().numel() == everything.numel()
    assert int(everything.min()) >= page_size
    assert int(everything.max()) < (pages + 1) * page_size
    owners = [set((s // page_size).tolist()) for s in slots]
    assert sum(map(len, owners)) == len(set.union(*owners))
    for request in slots:
        offsets = torch.arange(request.numel()) % page_size
        assert torch.equal(request % page_size, offsets)
    steps = slots[3][page_size:] - slots[3][:-page_size]
    assert {
        "contiguous": bool((steps == page_size).all()),
        "shuffled_pages": len(set(steps.tolist())) > 1,
        "interleaved": bool((steps > 0).all()) and int(steps[0]) > page_size,
        "non_monotonic": bool((steps < 0).all()),
    }[slot_layout]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("raw", [False, True])
def test_what_no_request_owns_is_nan(layout: str, raw: bool) -> None:
    case = Case(
        prefix_lens=(5, 0, 7),
        extend_lens=(2, 1, 1),
        page_size=4,
        layout=layout,
        num_q_heads=4,
        num_kv_heads=2,
        kv_dtype="float8_e4m3fn",
        k_scale=(0.5, 2.0),
        slot_layout="interleaved",
    )
    world = World(case, raw_prefix=raw)
    step = build_step(world)
    run_step(step)
    owned = torch.zeros(world.pool.total_slots, dtype=torch.bool)
    owned[torch.cat(world.slots)] = True
    for cache, copy, scale in zip(
        raw_kv(world.pool), (world.keys, world.values), ((0.5, 2.0), 1.0), strict=True
    ):
        by_slot = cache.reshape(-1, *cache.shape[2:]).double() * torch.tensor(scale).reshape(-1, 1)
        assert by_slot[~owned].isnan().all()
        assert torch.equal(by_slot[owned], copy[owned])
