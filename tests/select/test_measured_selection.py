"""Measured times in a decision: when they count, when not and what is said; workloads; routes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from measured_fakes import AB, BY_SIZE, FAST_B, HERE, bucket, decided, entry, prefill, table
from select_fakes import SPEC, both, host, library, record, reference, request, row, run

from anyattn.cli.main import main
from anyattn.core.capabilities import Phase
from anyattn.core.measure import Workload
from anyattn.core.select.decision import Decision
from anyattn.core.spec import AttentionSpec
from anyattn.errors import ConfigError

OLD = {"anyattn": "9.0", "torch": "2.13", "klib": "2.1"}
# --- what must match ---------------------------------------------------------------------------------


def test_a_table_of_this_device_decides_and_is_named() -> None:
    decision = decided(table(FAST_B))
    assert (decision.prefill.backend, decision.decode.backend) == ("b", "b")
    assert (decision.prefill.how, decision.decode.how) == ("measured", "measured")
    (use,) = decision.measured
    assert (use.table, use.used, use.reason, use.commit) == ("fake", True, "", "abc1234")
    assert decision.notes == ()
    assert Decision.from_json(json.loads(json.dumps(decision.to_json()))) == decision


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"device": "Other GPU"}, "made on Other GPU; this is Fake GPU"),
        ({"units": 66}, "made with 66 cores or units of Fake GPU; here are 132"),
        ({"versions": OLD}, "a doesn't count: measured with anyattn 9.0, here is"),
    ],
)
def test_another_device_or_version_is_not_used_and_it_is_said(fields: dict[str, Any], reason: str) -> None:
    decision = decided(table(FAST_B, **fields), host("x1", library("2.1.7"), num_units=132))
    assert (decision.decode.backend, decision.decode.how) == ("a", "priority")
    (use,) = decision.measured
    assert not use.used
    assert reason in use.reason
    assert any("measured table fake isn't used" in note and reason in note for note in decision.notes)
    assert reason.partition(";")[0] in " ".join(str(decision).split())


def test_a_table_of_another_architecture_that_was_named_is_refused_aloud() -> None:
    decision = decided(table(FAST_B, arch="cuda:x2"))
    assert decision.decode.backend == "a"
    assert decision.notes == ("measured table fake isn't used: made for cuda:x2; this is cuda:x1",)


@pytest.mark.parametrize(("version", "counts"), [("2.1.0", True), ("2.1.9.post1", True), ("2.2.0", False)])
def test_library_versions_count_to_their_minor(version: str, counts: bool) -> None:
    decision = decided(table(FAST_B), host("x1", library(version)))
    assert decision.decode.how == ("measured" if counts else "priority")
    if not counts:
        said = "a doesn't count: measured with klib 2.1.0, here is 2.2.0"
        assert said in decision.measured[0].reason


def test_only_the_backend_whose_library_changed_drops_out() -> None:
    records = (*AB, record("c"))
    times = {bucket(): entry(a=100, b=300, c=200)}
    old = table(times, versions={"anyattn": "0.1.9", "torch": "2.13", "klib": "2.0"})
    decision = run(records, request(), HERE, both("a", "b", "c"), tables=[old])
    assert decision.decode.backend == "a", "its time is out of date, which speaks against nothing"
    assert [c.backend for c in decision.candidates if c.phase is Phase.DECODE] == ["a", "b", "c"]
    assert "measured: a doesn't count: measured with klib 2.0, here is 2.1.7" in decision.notes
    decision = run(records, request(), HERE, both("b", "c", "a"), tables=[old])
    assert (decision.decode.backend, decision.decode.how) == ("c", "measured")


def test_a_library_that_the_table_does_not_name_does_not_count() -> None:
    decision = decided(table(FAST_B, versions={"anyattn": "0.1.0", "torch": "2.13.0"}))
    assert "a doesn't count: measured with klib (unknown)" in decision.measured[0].reason


def test_a_simulated_host_with_an_open_version_matches() -> None:
    decision = decided(table(FAST_B), host("x1", library(None), simulated=True))
    assert decision.decode.how == "measured"


def test_other_shapes_are_not_used_and_it_is_said() -> None:
    spec = AttentionSpec(num_q_heads=32, num_kv_heads=4, head_dim=128)
    decision = run(AB, request(spec), HERE, both("a"), tables=[table(FAST_B)])
    assert decision.decode.backend == "a"
    assert "fake has no bucket of 32/4 heads of 128, bfloat16 for decode" in decision.measured[0].reason
    decision = decided(table(FAST_B), dtype="float16")
    assert decision.decode.backend == "a"


def test_shards_of_a_model_count_as_the_model() -> None:
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)
    own = {bucket(spec=spec): entry(a=100, b=300)} | FAST_B
    assert run(AB, request(spec), HERE, both("a"), tables=[table(FAST_B)]).decode.backend == "b"
    assert run(AB, request(spec), HERE, both("a"), tables=[table(own)]).decode.backend == "a", (
        "its own goes first"
    )


def test_all_shapes_of_a_model_count_alike() -> None:
    window = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, sliding_window=4096)
    times = {bucket(): entry(a=100, b=110), bucket(spec=window): entry(a=200, b=100)}
    both_kinds = request(SPEC, window)
    assert run(AB, both_kinds, HERE, both("a"), tables=[table(times)]).decode.backend == "b"
    assert run(AB, request(SPEC), HERE, both("b"), tables=[table(times)]).decode.backend == "a"


def test_eager_times_rank_prefill_and_graphs_rank_decode() -> None:
    times = {
        bucket(): entry(a=300, b=100),
        bucket(run="eager"): entry(a=100, b=300),
        prefill(): entry(a=100, b=300),
        prefill(run="graph"): entry(a=300, b=100),
    }
    decision = decided(table(times))
    assert (decision.prefill.backend, decision.decode.backend) == ("a", "b")
    eager = decided(table(times), workload=Workload(graphs=False))
    assert (eager.prefill.backend, eager.decode.backend) == ("a", "a")


def test_short_extends_rank_verification_alone() -> None:
    limits = {"page_size": 16}
    times = {prefill(new_tokens=4): entry(a=300, b=100), prefill(): entry(a=100, b=300)}
    decision = decided(table(times), **limits)
    assert decision.prefill.backend == "a"
    assert decision.verify is not None
    assert decision.verify.backend == "a", "verification follows prefill where that fits"


# --- who is stronger ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "environ", "pins", "how"),
    [
        ({"decode": "a"}, {}, (), "explicit"),
        ({}, {"ANYATTN_DECODE_BACKEND": "a"}, (), "environment"),
        ({}, {}, ({"host": {"platform": "cuda", "arch": "x1"}, "decode": "a"},), "pinned"),
    ],
)
def test_whoever_names_a_backend_beats_the_table(asked: Any, environ: Any, pins: Any, how: str) -> None:
    decision = run(AB, request(**asked), HERE, (), environ=environ, pins=pins, tables=[table(FAST_B)])
    assert (decision.decode.backend, decision.decode.how) == ("a", how)
    assert decision.prefill.how == "measured"


def test_a_table_that_ranked_nothing_is_not_called_used() -> None:
    decision = decided(table(FAST_B), backend="a")
    assert (decision.measured[0].used, decision.notes) == (False, ())


def test_the_pair_still_shares_a_page() -> None:
    """b is fastest in decode and reads a layout that a can't: the pair that fits wins."""
    narrow = (record("a"), record("b", row(phases=(Phase.DECODE,), layouts=("HND",))))
    decision = run(narrow, request(), HERE, both("a"), tables=[table({bucket(): entry(a=300, b=100)})])
    assert (decision.prefill.backend, decision.decode.backend, decision.kv.layout) == ("a", "a", "NHD")


def test_second_rate_backends_stay_behind_whatever_the_table_says() -> None:
    records = (record("a"), reference())
    times = {bucket(): entry(a=300, torch_native=100)}
    assert run(records, request(), HERE, both("a"), tables=[table(times)]).decode.backend == "a"


def test_the_page_that_is_asked_for_decides_which_times_count() -> None:
    times = {bucket(): entry(a=300, b=100), bucket(page=64): entry(a=100, b=300)}
    assert decided(table(times), page_size=64).decode.backend == "a"
    assert decided(table(times), page_size=16).decode.backend == "b"
    assert decided(table({bucket(): entry(a=300, b=100)}), page_size=64).decode.backend == "b", (
        "else all pages"
    )


# --- workloads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "decode"),
    [
        (None, "a"),
        (Workload(requests=64, kv_len=8000), "b"),
        (Workload(requests=100), "b"),
        (Workload(kv_len=1500), "a"),
    ],
)
def test_times_near_the_workload_decide(workload: Workload | None, decode: str) -> None:
    assert decided(table(BY_SIZE), workload=workload).decode.backend == decode


def test_prefill_goes_by_its_chunk() -> None:
    assert decided(table(BY_SIZE), workload=Workload(new_tokens=6000)).prefill.backend == "b"
    assert decided(table(BY_SIZE), workload=Workload(new_tokens=300)).prefill.backend == "a"


def test_a_workload_far_from_every_bucket_is_not_guessed() -> None:
    decision = decided(table(BY_SIZE), workload=Workload(requests=1024, kv_len=1024))
    assert (decision.decode.backend, decision.decode.how) == ("a", "priority")
    assert any("no bucket near the workload for decode; the nearest is decode" in n for n in decision.notes)


def test_a_workload_survives_json_and_is_of_one_type() -> None:
    decision = decided(table(BY_SIZE), workload=Workload(requests=64))
    assert Decision.from_json(decision.to_json()).request.workload == Workload(requests=64)
    with pytest.raises(ConfigError, match="workload"):
        request(workload={"requests": 64})


# --- the command -------------------------------------------------------------------------------------


def test_the_command_takes_workload_and_route(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"anyattn": "0.1.0", "torch": "2.14", "flashinfer-python": "0.7.2", "triton": "3.7.0"}
    times = {
        bucket(): entry(flashinfer=300, triton=100),
        bucket(requests=1): entry(flashinfer=100, triton=300),
    }
    measured = table(times, device="NVIDIA H200", arch="cuda:sm90", versions=versions)
    measured.save(tmp_path / "h200.json")
    monkeypatch.setenv("ANYATTN_MEASUREMENTS", str(tmp_path / "h200.json"))
    options = ["select", "--assume", "cuda:sm90+flashinfer-python==0.7.2+triton==3.7.1", "--json"]

    def command(*more: str) -> Any:
        assert main([*options, *more]) == 0
        return json.loads(capsys.readouterr().out)

    assert command("--requests", "64")["decode"]["backend"] == "triton"
    found = command("--requests", "1", "--route")
    assert found["decode"]["backend"] == "flashinfer"
    assert [m["backend"] for m in found["routes"][0]["members"]] == ["flashinfer", "triton"]
    assert found["measured"][0]["used"] is True
    monkeypatch.setenv("ANYATTN_MEASUREMENTS", "none")
    assert command()["measured"] == []


def test_doctor_names_the_tables(read: Callable[..., str]) -> None:
    text = " ".join(read("doctor", "--assume", "cuda:sm90").split())
    assert "Measured tables counts h200 NVIDIA H200, 2026-11-29, commit abc1234" in text
    assert "measured with torch 2.13.1+cu130 (here 2.14.1): backends that run on these" in text
    found = json.loads(read("doctor", "--assume", "cuda:sm90", "--json"))
    assert found["measured"][0]["used"] is True
    text = " ".join(read("doctor", "--assume", "cuda:sm100").split())
    assert (
        "unused h200 NVIDIA H200, 2026-11-29, commit abc1234 made for cuda:sm90; this is cuda:sm100" in text
    )


def test_doctor_survives_a_table_that_it_cannot_read(read: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "h200.json").write_text("[]")
    assert "schema of a measured table" in " ".join(read("doctor", "--assume", "cuda:sm90").split())


@pytest.fixture(name="read")
def _read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    table(FAST_B, device="NVIDIA H200", arch="cuda:sm90").save(tmp_path / "h200.json")
    monkeypatch.setenv("ANYATTN_MEASUREMENTS", str(tmp_path / "h200.json"))

    def read(*argv: str) -> str:
        assert main(list(argv)) == 0
        return capsys.readouterr().out

    return read
