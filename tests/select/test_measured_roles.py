"""Mixed steps and verification follow a phase's backend until one of their own is measured to be faster."""

from __future__ import annotations

import json
from typing import Any

import pytest
from measured_fakes import AB, HERE, bucket, entry, prefill, table
from select_fakes import both, record, request, row, run

from anyattn.core.capabilities import Feature, PageSizes, Phase
from anyattn.core.measure import Bucket, Role
from anyattn.core.select.decision import Decision, Route
from anyattn.core.spec import Limits

LIMITS = Limits(max_requests=64, max_tokens=4096, max_context=1 << 16, max_draft_tokens=8)
SLOW_B = {bucket(): entry(a=100, b=300), prefill(): entry(a=100, b=300)}
"""a prefills and decodes."""


def verify(**fields: Any) -> Bucket:
    return bucket(**({"role": Role.VERIFY, "new_tokens": 4} | fields))


def mixed(**fields: Any) -> Bucket:
    return bucket(**({"role": Role.MIXED, "run": "eager", "new_tokens": 2048, "prompts": 1} | fields))


def decided(times: Any, records: Any = AB, **asked: Any) -> Decision:
    asked.setdefault("limits", LIMITS)
    return run(records, request(**asked), HERE, both("a"), tables=[table(SLOW_B | times)])


def verifier(decision: Decision) -> tuple[str, str, str]:
    assert decision.verify is not None
    return decision.verify.backend, decision.verify.how, decision.verify.evidence


# --- one backend for the role --------------------------------------------------------------------------


def test_verification_goes_to_whoever_is_measured_faster_in_it() -> None:
    decision = decided({verify(): entry(a=150, b=100)})
    assert (decision.prefill.backend, decision.decode.backend) == ("a", "a")
    name, how, evidence = verifier(decision)
    assert (name, how) == ("b", "measured")
    assert evidence == "1.50 x faster than a, 1 bucket of table fake (Fake GPU, 2026-11-29)"
    assert f"verify: {evidence}" in " ".join(str(decision).split())
    assert Decision.from_json(json.loads(json.dumps(decision.to_json()))) == decision


@pytest.mark.parametrize(
    "times",
    [
        {},
        {verify(): entry(a=101, b=100)},
        {verify(): entry(a=110, b=100, spread=0.2)},
        {verify(): entry(a=150, b=100), verify(requests=1): entry(a=100, b=150)},
        {prefill(new_tokens=4): entry(a=300, b=100)},
    ],
    ids=[
        "no times",
        "within 2 %",
        "within the spread",
        "as often slower",
        "short extends are no steps of it",
    ],
)
def test_verification_follows_where_nothing_speaks_against_it(times: Any) -> None:
    assert verifier(decided(times)) == ("a", "priority", "same backend as prefill")


@pytest.mark.parametrize("asked", [{"prefill": "a"}, {"decode": "a"}, {"backend": "a"}, {"verify": "a"}])
def test_who_follows_a_backend_that_somebody_named_stays_with_it(asked: Any) -> None:
    assert verifier(decided({verify(): entry(a=150, b=100)}, **asked))[0] == "a"


def test_times_of_another_page_do_not_move_it_where_there_are_some_of_the_pool() -> None:
    times = {verify(page=64): entry(a=100, b=150), verify(page=16): entry(a=300, b=100)}
    assert verifier(decided(times, page_size=64))[0] == "a"
    assert verifier(decided(times, page_size=16))[0] == "b"
    assert decided(times).kv == decided({}).kv, "the pool is chosen by prefill and decode"
    assert verifier(decided(times))[0] == "a", "its pages are of 64"


def test_pages_that_it_cannot_read_keep_it_out() -> None:
    records = (record("a", row(pages=PageSizes(sizes=(16,)))), record("b", row(pages=PageSizes(sizes=(64,)))))
    assert verifier(decided({verify(): entry(a=150, b=100)}, records))[0] == "a"


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"features": (Feature.TREE_VERIFY,)}, {"features": ()}),
        ({"features": (Feature.TREE_VERIFY, Feature.RAGGED_VERIFY)}, {"features": (Feature.TREE_VERIFY,)}),
        ({"graph": 2}, {"graph": 0}),
        ({}, {"degraded": "slow"}),
    ],
    ids=["trees", "ragged drafts", "graphs", "second-rate"],
)
def test_nobody_takes_trees_or_graphs_away(first: Any, other: Any) -> None:
    times = {verify(): entry(a=150, b=100), verify(requests=1): entry(a=100, b=150)}
    kept = decided(times, (record("a", row(**first)), record("b", row(**other))), route=())
    assert verifier(kept)[0] == "a"
    assert kept.route(Phase.VERIFY) is None
    swapped = decided(times, (record("a", row(**other)), record("b", row(**first))), route=())
    assert "degraded" in other or swapped.route(Phase.VERIFY) is not None


def test_mixed_steps_go_to_whoever_is_measured_faster_in_them() -> None:
    decision = decided({mixed(): entry(a=150, b=100)})
    assert decision.mixed is not None
    assert (decision.prefill.backend, decision.mixed.backend, decision.mixed.how) == ("a", "b", "measured")
    assert decision.serving(Role.MIXED) is decision.mixed
    assert "\n  mixed    b" in str(decision)
    assert Decision.from_json(json.loads(json.dumps(decision.to_json()))) == decision
    plain = decided({})
    assert decision.digest() != plain.digest()
    assert plain.serving(Role.MIXED) is plain.prefill
    assert "mixed" not in str(plain)


@pytest.mark.parametrize(
    ("times", "asked"),
    [({mixed(): entry(a=101, b=100)}, {}), ({mixed(): entry(a=150, b=100)}, {"prefill": "a"})],
    ids=["within the noise", "prefill was named"],
)
def test_mixed_steps_stay_with_prefill_otherwise(times: Any, asked: Any) -> None:
    decision = decided(times, **asked)
    assert decision.mixed is None
    assert decision.prefill.backend == "a"


# --- several, by size ----------------------------------------------------------------------------------

TWO_SIZES = {
    verify(requests=64, kv_len=2048): entry(a=100, b=150),
    verify(requests=16, kv_len=8192, new_tokens=8): entry(a=150, b=100),
    mixed(requests=64, kv_len=4096, new_tokens=2048, prompts=1): entry(a=100, b=150),
    mixed(requests=128, kv_len=2048, new_tokens=1024, prompts=2): entry(a=150, b=100),
}


def routes(decision: Decision) -> dict[Role, Route]:
    return {route.role: route for route in decision.routes}


def test_each_role_has_rules_of_its_own() -> None:
    decision = decided(TWO_SIZES, route=())
    found = routes(decision)
    assert set(found) == {Role.VERIFY, Role.MIXED}
    assert {(r.requests, r.new_tokens, r.prompts): r.backend for r in found[Role.MIXED].rules} == {
        (64, 2048, 1): "a",
        (128, 1024, 2): "b",
    }
    assert {(r.requests, r.new_tokens): r.backend for r in found[Role.VERIFY].rules} == {
        (64, 4): "a",
        (16, 8): "b",
    }
    assert Decision.from_json(json.loads(json.dumps(decision.to_json()))) == decision
    assert {
        "verify: routed by measured steps (a 1, b 1)",
        "mixed: routed by measured steps (a 1, b 1)",
    } <= set(decision.notes)
    said = " ".join(str(decision).split())
    assert "verify, graph, by the nearest of 64 x 2048, 4 new: a; 16 x 8192, 8 new: b" in said
    assert (
        "mixed, eager, by the nearest of 64 x 4096, 1 with 2048 new: a; 128 x 2048, 2 with 1024 new: b"
        in said
    )
    assert "these are rows of table fake" in said


def test_verification_is_not_routed_where_nothing_is_verified() -> None:
    none = Limits(max_requests=64, max_tokens=4096, max_context=1 << 16)
    assert set(routes(decided(TWO_SIZES, limits=none, route=()))) == {Role.MIXED}
    assert not any(note.startswith("verify") for note in decided(TWO_SIZES, limits=none, route=()).notes)


def test_the_fastest_of_all_mixed_steps_takes_them_though_prefill_is_routed() -> None:
    """They aren't looked up by the sizes of prompts, where others win."""
    times = {
        prefill(new_tokens=256): entry(a=20, b=10),
        mixed(): entry(a=100, b=150),
        mixed(requests=8): entry(a=100, b=150),
    }
    decision = decided(times, route=())
    assert set(routes(decision)) == {Role.PREFILL}
    assert decision.mixed is not None
    assert decision.mixed.backend == "a"
    assert "mixed: not routed, one backend is the fastest of every measured step" in decision.notes


def test_short_extends_are_routed_with_prefill_and_do_not_rank_it() -> None:
    decision = decided({prefill(new_tokens=4): entry(a=900, b=10)}, route=())
    assert decision.prefill.backend == "a"
    route = decision.route(Role.PREFILL)
    assert route is not None
    assert {r.new_tokens: r.backend for r in route.rules} == {8192: "a", 4: "b"}


def test_routes_of_older_decisions_are_read() -> None:
    decision = decided(TWO_SIZES, route=())
    old = decision.to_json()
    del old["mixed"]
    for route in old["routes"]:
        route["phase"] = route.pop("role")
        del route["table"]
        for rule in route["rules"] if route["phase"] == "verify" else ():
            del rule["prompts"]
    again = Decision.from_json(old)
    assert [(r.role, r.rules) for r in again.routes] == [(r.role, r.rules) for r in decision.routes]
    assert again.mixed is None
