"""Order among backends that pass: measured, preferred by exact chip, registered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from select_fakes import both, host, prefer, record, request, run

from anyattn.core.capabilities import ModelKind, Phase
from anyattn.core.select.rank import Measured, Measurements, bucket, load_measurements, rank
from anyattn.errors import ConfigError

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
NAMES = ("a", "b", "c")


def order(*preferences: object, times: Measurements | None = None, phase: Phase = DECODE) -> list[str]:
    ranks = rank(NAMES, phase, request(), host(), preferences, times)  # type: ignore[arg-type]
    return [r.backend for r in ranks]


def table(**seconds: float) -> Measurements:
    entries = {name: Measured(value, 0.05) for name, value in seconds.items()}
    return {("Fake GPU", DECODE, bucket(request())): entries}


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
    entry = prefer("b", phase=DECODE, library="blib 1.2")
    found = rank(NAMES, DECODE, request(), host(), [entry])
    assert found[0].evidence == "a guess (2026-01-02, blib 1.2)"
    assert "order of registration" in found[1].evidence


def test_measured_beats_preferred() -> None:
    lists = prefer("a", phase=DECODE)
    assert order(lists, times=table(a=3e-4, c=1e-4)) == ["c", "a", "b"]
    found = rank(NAMES, DECODE, request(), host(), [lists], table(a=3e-4, c=1e-4))
    assert [r.how for r in found] == ["measured", "measured", "priority"]


def test_a_difference_inside_the_noise_flips_nothing() -> None:
    assert order(prefer("a", phase=DECODE), times=table(a=1.04e-4, c=1e-4))[0] == "a"
    assert order(prefer("a", phase=DECODE), times=table(a=1.06e-4, c=1e-4))[0] == "c"


def test_one_time_alone_compares_nothing() -> None:
    assert order(prefer("a", phase=DECODE), times=table(c=1e-6))[0] == "a"


def test_times_of_another_device_phase_or_bucket_do_not_count() -> None:
    times = table(a=3e-4, c=1e-4)
    assert order(times=times, phase=PREFILL)[0] == "a"
    found = rank(NAMES, DECODE, request(dtype="float16"), host(), (), times)
    assert found[0].backend == "a"
    found = rank(NAMES, DECODE, request(), host(device_name="Other"), (), times)
    assert found[0].backend == "a"


def test_a_measured_decision_says_so(tmp_path: Path) -> None:
    rows = [
        {"device": "cuda:x1", "phase": "decode", "bucket": bucket(request()), "backend": n, "seconds": s}
        for n, s in (("a", 3e-4), ("b", 1e-4))
    ]
    path = tmp_path / "table.json"
    path.write_text(json.dumps(rows))
    assert load_measurements(path)[("cuda:x1", DECODE, bucket(request()))]["b"] == Measured(1e-4)
    environ = {"ANYATTN_MEASUREMENTS": str(path)}
    decision = run((record("a"), record("b")), preferences=both("a"), environ=environ)
    assert (decision.prefill.backend, decision.decode.backend) == ("a", "b")
    assert decision.decode.how == "measured"
    assert "100 µs" in decision.decode.evidence


@pytest.mark.parametrize("text", ["", "{}x", '[{"device": "d"}]', '[{"phase": "none"}]'])
def test_an_unreadable_table_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="measurement table"):
        load_measurements(path)


def test_the_only_backend_says_so() -> None:
    decision = run((record("a"),))
    assert (decision.prefill.how, decision.decode.how) == ("only", "only")
