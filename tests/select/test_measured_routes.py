"""Routes in a decision: which steps go to whom, when nothing is routed, and what is said then."""

from __future__ import annotations

import json
from typing import Any

import pytest
from measured_fakes import AB, BY_SIZE, FAST_B, HERE, bucket, decided, entry, table
from select_fakes import SPEC, both, record, request, row, run

import anyattn
from anyattn.core.capabilities import PageSizes, Phase
from anyattn.core.select.decision import Decision
from anyattn.errors import ConfigError, UnknownNameError


def test_a_route_sends_each_measured_step_to_its_fastest() -> None:
    decision = decided(table(BY_SIZE), route=())
    route = decision.route(Phase.DECODE)
    assert route is not None
    assert [member.backend for member in route.members] == ["a", "b"]
    assert [(r.requests, r.kv_len, r.backend) for r in route.rules] == [(1, 1024, "a"), (64, 8192, "b")]
    assert route.members[0] == decision.decode
    assert "decode: routed by measured steps (a 1, b 1)" in decision.notes
    assert Decision.from_json(json.loads(json.dumps(decision.to_json()))) == decision
    assert decided(table(BY_SIZE)).digest() != decision.digest()
    assert "routed with b" in str(decision)


def test_steps_within_the_noise_stay_where_they_are() -> None:
    times = BY_SIZE | {bucket(requests=8): entry(a=101, b=100)}
    route = decided(table(times), route=()).route(Phase.DECODE)
    assert route is not None
    assert {r.requests: r.backend for r in route.rules} == {1: "a", 64: "b", 8: "a"}


def test_a_route_of_named_members() -> None:
    records = (*AB, record("c"))
    times = {bucket(): entry(a=100, b=50, c=10), bucket(requests=1): entry(a=1, b=2, c=3)}
    decision = run(records, request(route=("a", "b")), HERE, both("a"), tables=[table(times)])
    route = decision.route(Phase.DECODE)
    assert route is not None
    assert {m.backend for m in route.members} == {"a", "b"}, "the fastest, c, isn't among them"
    with pytest.raises(UnknownNameError, match="backend"):
        run(records, request(route=("d",)), HERE, both("a"), tables=[table(times)])


@pytest.mark.parametrize(
    ("measured", "asked", "note"),
    [
        (None, {}, "not routed, no measured table compares backends"),
        (table(FAST_B), {}, "not routed, one backend is the fastest of every measured step"),
        (table(BY_SIZE), {"decode": "a"}, "not routed, it was chosen explicitly"),
    ],
)
def test_where_nothing_is_routed_a_note_says_why(measured: Any, asked: Any, note: str) -> None:
    decision = decided(measured, route=(), **asked)
    assert decision.route(Phase.DECODE) is None
    assert f"decode: {note}" in " ".join(decision.notes)


def test_members_that_the_pool_does_not_suit_stay_out() -> None:
    narrow = (record("a", row(pages=PageSizes(sizes=(16,)))), record("b", row(pages=PageSizes(sizes=(64,)))))
    decision = run(narrow, request(route=()), HERE, both("a"), tables=[table(BY_SIZE)])
    assert decision.routes == ()


def test_a_member_without_graphs_does_not_take_those_of_decode_away() -> None:
    graphs, none = row(graph=2), row(graph=0)
    first = run(
        (record("a", graphs), record("b", none)), request(route=()), HERE, both("a"), tables=[table(BY_SIZE)]
    )
    assert first.route(Phase.DECODE) is None
    assert first.route(Phase.PREFILL) is not None
    uniform = (record("a", graphs), record("b", row(graph=1)))
    found = run(uniform, request(route=()), HERE, both("a"), tables=[table(BY_SIZE)])
    assert found.route(Phase.DECODE) is not None, "a decode step has one token a request anyway"
    equal = run(
        (record("a", none), record("b", none)), request(route=()), HERE, both("a"), tables=[table(BY_SIZE)]
    )
    assert equal.route(Phase.DECODE) is not None


def test_a_route_is_not_batch_invariant() -> None:
    with pytest.raises(ConfigError, match="isn't batch-invariant"):
        request(route=(), deterministic=2)
    assert request(route=(), deterministic=1).route == ()


def test_decisions_from_before_there_were_routes_are_read() -> None:
    decision = decided(None)
    old = decision.to_json()
    for name in ("routes", "measured"):
        del old[name]
    for name in ("workload", "route"):
        del old["request"][name]
    assert Decision.from_json(old) == decision


@pytest.mark.parametrize("route", [3, [3], None])
def test_a_route_is_names(route: object) -> None:
    with pytest.raises(ConfigError, match="names of backends"):
        anyattn.select(SPEC, dtype="float32", device="cpu", route=route)  # type: ignore[arg-type]
