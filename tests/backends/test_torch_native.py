"""`torch_native` against the oracle: random cases of everything it must do.

Steps that follow each other: `test_torch_native_steps.py`.

A failing random case prints itself; `check_case(Case(...))` runs it again.
"""

from __future__ import annotations

import secrets

import pytest
import torch

from anyattn.backends.reference import attend
from anyattn.testing.builder import build_step
from anyattn.testing.cases import Case, CaseSpace, random_cases
from anyattn.testing.judge import check_case, judge, run_step
from anyattn.testing.world import World

HALF = CaseSpace(
    dtypes=(
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float16", "float8_e5m2"),
        ("float32", "bfloat16"),
    )
)
FP8 = CaseSpace(
    dtypes=tuple(
        (model, kv)
        for model in ("float32", "bfloat16")
        for kv in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
    ),
    kv_scales=(1.0, 0.5, 0.04, 3.0),
    scales_per_head=True,
)
FRESH = secrets.randbits(32)


def check_many(seed: int | str, count: int, space: CaseSpace | None = None, device: str = "cpu") -> None:
    reports = (check_case(case, device=device) for case in random_cases(seed, count, space))
    failed = [report for report in reports if not report.passed]
    text = "\n".join(map(str, failed[:5]))
    assert not failed, f"{len(failed)} of {count} cases of seed {seed!r} failed:\n{text}"


@pytest.mark.parametrize("seed", range(12))
def test_float32(seed: int) -> None:
    """12 x 50 cases, error <= 1e-5."""
    check_many(seed, 50)


def test_float32_fresh_seed() -> None:
    """Cases that nobody has seen before; the seed is printed on failure."""
    check_many(FRESH, 80)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device")
@pytest.mark.parametrize("space", [None, HALF, FP8], ids=["float32", "half", "fp8"])
def test_on_the_accelerator(space: CaseSpace | None) -> None:
    """The same on a GPU: the packed upload, device tables, device scales."""
    check_many("gpu", 60, space, device="cuda")


@pytest.mark.parametrize("seed", range(3))
def test_half_precision(seed: int) -> None:
    """bfloat16 within 2e-2, float16 within 3e-3 of the float64 answer on the same inputs."""
    check_many(f"half{seed}", 40, HALF)


@pytest.mark.parametrize("seed", range(3))
def test_fp8_cache(seed: int) -> None:
    """The oracle gets the values rounded and saturated as stored; then float32 is as exact as ever."""
    check_many(f"fp8{seed}", 40, FP8)


def test_cases_in_address_stable_buffers() -> None:
    """Planned into preallocated buffers, as a graph would be: twice, so that stale contents would show."""
    for case in random_cases("buffers", 60):
        world = World(case)
        world.backend.init_cuda_graph_state(world.decision.request.limits)
        step = build_step(world)
        for _ in range(2):
            report = judge(run_step(step))
            assert report.passed, str(report)


def test_long_queries_are_processed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "_MAX_SCORES", 64)
    check_many("blocks", 60)


def test_random_cases_hold_what_they_promise() -> None:
    """The suite means something only if these combinations do come up, and often."""
    cases = [case for seed in range(12) for case in random_cases(seed, 50)]
    assert len(cases) >= 500
    for wanted in (
        lambda c: c.strided and c.flat and c.page_size > 1,
        lambda c: c.give_out and c.return_lse,
        lambda c: c.slot_layout == "non_monotonic" and c.layout == "HND",
        lambda c: c.slot_layout == "shuffled_pages" and c.window,
        lambda c: c.mode == "mixed" and c.batch_size > 2,
        lambda c: c.mask and c.window,
        lambda c: c.sinks and c.logit_cap and c.window,
        lambda c: c.kv == "arguments" and any(c.prefix_lens),
        lambda c: c.kv == "cached",
        lambda c: c.padding and c.return_lse,
        lambda c: c.kind == "cross" and c.mode == "decode",
        lambda c: c.kind == "cross" and 0 in (c.encoder_lens or ()),
        lambda c: c.kind == "encoder_only" and c.window,
        lambda c: c.head_dim != c.v_head_dim and c.num_q_heads > c.num_kv_heads > 1,
    ):
        assert sum(bool(wanted(c)) for c in cases) >= 5


@pytest.mark.parametrize("window", [1, 2, 3, 8])
@pytest.mark.parametrize("page_size", [1, 4])
def test_every_length_around_a_window(window: int, page_size: int) -> None:
    """One request each for prefix 0 .. 2W + 2, one and three new tokens."""
    prefix = tuple(range(2 * window + 3))
    for extend, mode in ((1, "decode"), (1, "extend"), (3, "extend")):
        case = Case(
            mode=mode,
            prefix_lens=prefix,
            extend_lens=(extend,) * len(prefix),
            window=window,
            page_size=page_size,
            slot_layout="shuffled_pages",
            sinks=extend == 3,
        )
        report = check_case(case)
        assert report.passed, str(report)


def test_large_scores_do_not_overflow() -> None:
    case = Case(prefix_lens=(20,), extend_lens=(5,), scale=300.0, sinks=True)
    world = World(case)
    step = run_step(build_step(world))
    report = judge(step)
    assert max(report.out_errors) < 1e-4, str(report)
    assert float(step.lse.abs().max()) > 100


def test_same_call_twice_is_bit_equal() -> None:
    """The catalog's claim: run to run."""
    world = World(Case(prefix_lens=(30, 7), extend_lens=(9, 1), num_q_heads=4, num_kv_heads=2, page_size=4))
    step = build_step(world)
    first = run_step(step).out.clone()
    assert torch.equal(run_step(step).out, first)
