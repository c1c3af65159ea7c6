"""What a run does follows from what is declared: axes, pins, checks, refusals, results."""

from __future__ import annotations

import dataclasses

import pytest

from anyattn.core.capabilities import Feature, Phase
from anyattn.errors import ConfigError, SelectionError
from anyattn.testing.axes import FULL, QUICK, axes_of, case_of, feasible_for
from anyattn.testing.cases import Case, parse_case
from anyattn.testing.checks import CHECKS, Subject
from anyattn.testing.checks_promises import with_lse
from anyattn.testing.declared import Declared, declared
from anyattn.testing.explain import blamed, simpler
from anyattn.testing.kit import Result, Summary, reproduction, run_item, run_items
from anyattn.testing.pairwise import covering_rows
from anyattn.testing.plan import Item, plan_kit, plan_random
from anyattn.testing.pool import decode_item, decode_result, encode_item, encode_result, run_in_workers
from anyattn.testing.report import merge_table
from anyattn.testing.subject import open_subject

CASE = Case(mode="decode", prefix_lens=(6, 2), extend_lens=(1, 1), head_dim=16, v_head_dim=16, window=5)


@pytest.fixture(scope="module")
def native() -> Declared:
    return declared("torch_native", "cpu")


def less(native: Declared, *features: Feature, **fields: object) -> Declared:
    """The declaration without some features."""
    rows = tuple(
        dataclasses.replace(r, features=tuple(f for f in r.features if f not in features), **fields)
        for r in native.rows
    )
    return dataclasses.replace(native, rows=rows, record=dataclasses.replace(native.record, rows=rows))


def test_every_pair_that_is_declared_is_covered(native: Declared) -> None:
    plan = plan_kit(native)
    assert plan.coverage.covered == plan.coverage.possible > 3000
    assert {item.check for item in plan.items} | {i.check for i, _ in plan.skipped} == set(CHECKS)
    assert all(native.refusal(item.case) is None for item in plan.items)
    assert plan_kit(native).items == plan.items
    assert plan_kit(native, seed=1).items != plan.items


def test_declaring_less_asks_for_less(native: Declared) -> None:
    small = less(native, Feature.WINDOW, Feature.SINKS, Feature.CROSS, Feature.NO_CACHE_WRITE,
                 dtypes=("bfloat16",), kv_dtypes=("bfloat16",), layouts=("HND",))  # fmt: skip
    plan = plan_kit(small)
    cases = [item.case for item in plan.items]
    assert cases
    assert all(c.window is None and not c.sinks and c.kind != "cross" for c in cases)
    assert {(c.dtype, c.kv_dtype, c.layout) for c in cases if c.kind != "encoder_only"} == {
        ("bfloat16", "bfloat16", "HND")
    }
    assert {c.kind for c in cases if c.kv == "arguments"} == {"encoder_only"}
    assert any("window" in why for _, why in plan.skipped)
    assert plan.coverage.possible < plan_kit(native).coverage.possible


def test_a_backend_for_prefill_alone_gets_no_decode_cases(native: Declared) -> None:
    plan = plan_kit(less(native, phases=(Phase.PREFILL,)))
    assert {item.case.mode for item in plan.items if item.name.startswith("pairwise")} == {"extend", "mixed"}


@pytest.mark.parametrize("sizes", [QUICK, FULL])
def test_rows_become_cases_with_their_values(native: Declared, sizes: object) -> None:
    axes = axes_of(native, sizes)
    rows, _ = covering_rows(axes, feasible_for(native, axes), 3, limit=25)
    for row in rows:
        case = case_of(row, 3, sizes.max_context)
        assert (case.mode, case.window, case.sinks) == (row["mode"], row["window"], row["sinks"])
        assert (case.num_q_heads, case.num_kv_heads) == row["heads"]
        assert case.batch_size == row["batch"]
        assert max(case.seq_lens) <= max(sizes.max_context, 40)
        assert native.refusal(case) is None


def test_a_full_run_has_thousands_of_cases(native: Declared) -> None:
    plan = plan_kit(native, full=True, count=3000)
    assert len(plan.items) > 3000
    assert any(item.check == "offsets-past-2-31" for item in plan.items)
    assert len(plan_random(native, 10).items) == 10


def test_random_cases_of_a_backend_that_serves_little() -> None:
    """XQA decodes and verifies alone, without a cap or a log-sum-exp."""
    items = plan_random(declared("trtllm_mha", host="cuda:sm90"), 8, seed=0).items
    assert {item.case.mode for item in items} <= {"decode", "verify", "draft_extend"}
    assert len(items) == 8


def test_a_name_that_cannot_be_verified_here() -> None:
    with pytest.raises(SelectionError, match="fa3 can't be verified on this host"):
        declared("fa3", "cpu")


def test_cases_are_read_back_and_nothing_is_run() -> None:
    assert parse_case(repr(CASE)) == CASE
    for text in ("Case(", "print(1)", "Case(seed=print(1))", "Case(1)", "Case(sede=1)"):
        with pytest.raises(ConfigError, match="a case"):
            parse_case(text)
    with pytest.raises(ConfigError, match="lengths"):
        parse_case("Case(prefix_lens=(1, 2), extend_lens=(1,))")


def test_the_feature_to_blame_is_named() -> None:
    names = blamed(CASE, lambda case: case.window is None, lambda case: None)
    assert names == ["the window"]
    assert blamed(CASE, lambda case: True, lambda case: "not declared") == []
    encoder = Case(kind="encoder_only", kv="arguments", prefix_lens=(0,), extend_lens=(3,))
    assert all(case.kv == "arguments" for _, case in simpler(encoder))


def test_a_crash_is_a_failure_with_its_place_and_a_line_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = open_subject("torch_native", "cpu")

    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr("anyattn.backends.reference.torch_native.attend", broken)
    result = run_item(Item("numbers", CASE, "pinned"), subject)
    assert result.why is not None
    assert "RuntimeError in broken" in result.why
    line = reproduction(result, "torch_native", "cpu")
    assert line == f'anyattn verify torch_native --device cpu --case "{CASE!r}"'
    (explained,) = run_items([Item("merge", CASE, "x")], subject)
    assert explained.why is not None
    assert "--check merge" in reproduction(explained, "torch_native", "cpu")


def test_items_and_results_cross_processes() -> None:
    item = Item("merge", CASE, "a name")
    assert decode_item(encode_item(item)) == item
    result = Result(item, 0.25, "why", None, 1.5)
    assert decode_result(encode_result(result), item) == result


def test_workers_survive_an_item_that_kills_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same results as in one process, in order; a dead worker costs its own item."""
    items = [Item("numbers", dataclasses.replace(CASE, seed=s), f"{s}") for s in range(3)]
    results = run_in_workers(items, "torch_native", "cpu", 2)
    assert [r.item for r in results] == items
    assert all(r.passed for r in results)
    dead = run_in_workers(items[:1], "no_such_backend", "cpu", 1)
    assert dead[0].why is not None
    assert "the process ended" in dead[0].why


def test_the_table_keeps_other_sections() -> None:
    host = {"target": "cuda:sm90", "device": "cuda", "kernels": "native", "versions": {"torch": "2.13"}}
    summary = Summary("triton", [Result(Item("numbers", CASE, "x"), 2e-6)])
    once = merge_table("", summary, host)
    assert "## triton on cuda:sm90" in once
    assert "| float32 | float32 | 2.0e-06 |" in once
    other = Summary("torch_native", [Result(Item("numbers", CASE, "x"), 1e-7)])
    twice = merge_table(once, other, {**host, "device": "cpu", "target": "cpu:avx2"})
    assert twice.index("## torch_native on cpu") < twice.index("## triton on cuda:sm90")
    worse = Summary("triton", [Result(Item("numbers", CASE, "x"), 3e-6)])
    again = merge_table(twice, worse, host)
    assert "2.0e-06" not in again
    assert "3.0e-06" in again
    assert "1.0e-07" in again


@pytest.mark.parametrize(("backend", "has"), [("trtllm_mha", False), ("fa3", True)])
def test_an_lse_is_asked_of_those_that_declare_one(backend: str, has: bool) -> None:
    """XQA has none on SM90, and its list ended with a refusal there."""
    space = declared(backend, "cpu", "cuda:sm90")
    case = Case(
        mode="decode", prefix_lens=(6, 0), extend_lens=(1, 1), page_size=16, num_q_heads=4, num_kv_heads=2,
        head_dim=64, v_head_dim=64, dtype="bfloat16", kv_dtype="bfloat16", return_lse=False,
    )  # fmt: skip
    assert space.refusal(case) is None
    assert with_lse(Subject(space, "cpu", "cuda:sm90"), case).return_lse is has
