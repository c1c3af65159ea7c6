"""Order among backends that pass: measured, preferred by exact chip, registered."""

from __future__ import annotations

from measured_fakes import bucket, entry, table
from select_fakes import both, host, prefer, record, request, run

from anyattn.core.capabilities import ModelKind, Phase
from anyattn.core.measure import Timing
from anyattn.core.select.measured import NO_TIMES, RoleTimes
from anyattn.core.select.rank import Rank, rank

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
NAMES = ("a", "b", "c")


def ranked(*preferences: object, times: RoleTimes = NO_TIMES, phase: Phase = DECODE) -> tuple[Rank, ...]:
    return rank(NAMES, phase, request(), host(), preferences, times)  # type: ignore[arg-type]


def order(*preferences: object, times: RoleTimes = NO_TIMES, phase: Phase = DECODE) -> list[str]:
    return [r.backend for r in ranked(*preferences, times=times, phase=phase)]


def seen(*entries: dict[str, Timing]) -> RoleTimes:
    """Times of buckets that differ in their length."""
    found = {bucket(kv_len=1024 << i): times for i, times in enumerate(entries)}
    return RoleTimes(table(found), tuple(found.items()))


def test_registration_decides_last() -> None:
    assert order() == ["a", "b", "c"]
    assert order(prefer("c", phase=DECODE)) == ["c", "a", "b"]


def test_a_list_counts_for_its_exact_chip_phase_and_kind() -> None:
    assert order(prefer("c", phase=DECODE, arch="x2")) == ["a", "b", "c"]
    assert order(prefer("c", phase=PREFILL)) == ["a", "b", "c"]
    assert order(prefer("c", phase=DECODE, kind=ModelKind.MLA)) == ["a", "b", "c"]


def test_names_that_nobody_registered_are_skipped() -> None:
    assert order(prefer("plugin", "b", phase=DECODE)) == ["b", "a", "c"]


def test_verify_and_draft_fall_back_to_the_lists_of_prefill_and_decode() -> None:
    lists = (prefer("b"), prefer("c", phase=DECODE))
    assert order(*lists, phase=Phase.VERIFY)[0] == "b"
    assert order(*lists, phase=Phase.DRAFT)[0] == "c"
    assert order(*lists, prefer("a", phase=Phase.VERIFY), phase=Phase.VERIFY)[0] == "a"


def test_evidence_tells_the_list_its_date_and_library() -> None:
    found = ranked(prefer("b", phase=DECODE, library="blib 1.2"))
    assert found[0].evidence == "a guess (2026-01-02, blib 1.2)"
    assert "order of registration" in found[1].evidence


def test_measured_beats_preferred() -> None:
    found = ranked(prefer("a", phase=DECODE), times=seen(entry(a=300, c=100)))
    assert [r.backend for r in found] == ["c", "a", "b"]
    assert [r.how for r in found] == ["measured", "measured", "priority"]
    assert found[0].evidence == "3.00 x faster than a, 1 bucket of table fake (Fake GPU, 2026-11-29)"
    assert found[1].evidence.startswith("3.00 x slower than c, ")


def test_the_mean_over_buckets_is_geometric() -> None:
    """By sums a would win (401 to 402), by ratios c does."""
    found = ranked(prefer("a", phase=DECODE), times=seen(entry(a=1, c=0.5), entry(a=400, c=401.5)))
    assert found[0].backend == "c"
    assert found[0].evidence.startswith("1.41 x faster than a (1.00 to 2.00), 2 buckets ")


def test_a_difference_inside_the_noise_flips_nothing() -> None:
    lists = prefer("a", phase=DECODE)
    assert order(lists, times=seen(entry(0.05, a=104, c=100)))[0] == "a"
    assert order(lists, times=seen(entry(0.05, a=106, c=100)))[0] == "c"
    assert order(lists, times=seen(entry(0.0, a=101.9, c=100)))[0] == "a", "2 % is noise without a spread too"
    assert order(lists, times=seen(entry(0.0, a=102.1, c=100)))[0] == "c"


def test_the_noise_is_that_of_both() -> None:
    loud = {"a": Timing(1.06e-4, 0.0), "c": Timing(1e-4, 0.1)}
    assert order(prefer("a", phase=DECODE), times=seen(loud))[0] == "a"
    quiet = {"a": Timing(1.06e-4, 0.1), "c": Timing(1e-4, 0.0)}
    assert order(prefer("a", phase=DECODE), times=seen(quiet))[0] == "a"


def test_equal_times_leave_the_choice_to_the_list_and_say_so() -> None:
    found = ranked(prefer("a", phase=DECODE), times=seen(entry(a=101, c=100)))
    assert (found[0].backend, found[0].how) == ("a", "priority")
    assert found[0].evidence == (
        "a guess (2026-01-02); measured within 2% of c, 1 bucket of table fake (Fake GPU, 2026-11-29)"
    )


def test_among_those_equal_to_the_fastest_the_preferred_one_wins() -> None:
    found = ranked(prefer("a", "b", "c", phase=DECODE), times=seen(entry(a=110, b=101, c=100)))
    assert [r.backend for r in found] == ["b", "c", "a"]
    assert found[0].how == "measured"
    assert "1.09 x faster than a" in found[0].evidence, "told beside the backend that it replaces"


def test_one_time_alone_compares_nothing() -> None:
    assert order(prefer("a", phase=DECODE), times=seen(entry(c=1)))[0] == "a"


def test_a_backend_without_a_time_keeps_its_place_behind_the_one_before_it() -> None:
    listed = prefer("a", "b", "c", phase=DECODE)
    assert order(listed, times=seen(entry(a=300, c=100))) == ["c", "a", "b"]
    assert order(listed, times=seen(entry(b=300, c=100))) == ["a", "c", "b"]


def test_backends_that_skip_buckets_are_compared_where_both_ran() -> None:
    """b ran only where everything is slow."""
    listed = prefer("a", "b", phase=DECODE)
    assert order(listed, times=seen(entry(a=1, c=2), entry(a=100, b=50, c=200)))[:3] == ["b", "a", "c"]


def test_a_measured_decision_says_so() -> None:
    found = {bucket(): entry(a=300, b=100)}
    decision = run((record("a"), record("b")), preferences=both("a"), tables=[table(found)])
    assert (decision.prefill.backend, decision.decode.backend) == ("a", "b")
    assert decision.decode.how == "measured"
    assert "fastest measured" in str(decision)
    assert "3.00 x faster than a" in str(decision)


def test_the_only_backend_says_so() -> None:
    decision = run((record("a"),))
    assert (decision.prefill.how, decision.decode.how) == ("only", "only")
