"""The harness with a clock of its own: what it reports follows from samples that are known."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from anyattn.bench.harness import (
    Candidate,
    CpuTimer,
    CudaTimer,
    Result,
    Settings,
    Timer,
    Work,
    add_arguments,
    cache_bytes,
    emit,
    make_timer,
    measure,
    measure_limits,
    rotations,
    settings_of,
)

QUICK = Settings(rounds=5, warmup=1, limits=False)


def candidate(name: str, work: Work | None = None) -> Candidate:
    return Candidate(name, [lambda: None], work or Work())


class Scripted(Timer):
    """Hands out given seconds and remembers who was asked."""

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        self.seconds = {name: list(values) for name, values in seconds.items()}
        self.asked: list[str] = []

    def sample(self, candidate: Candidate, calls: int) -> float:
        self.asked.append(candidate.name)
        return self.seconds[candidate.name].pop(0)

    def calls_for(self, candidate: Candidate, seconds: float, most: int = 10_000) -> int:
        return 1


def scripted(rounds: int, **seconds: list[float]) -> tuple[Scripted, Settings, list[Candidate]]:
    timer = Scripted(seconds)
    return timer, Settings(rounds=rounds, warmup=0, limits=False), [candidate(n) for n in seconds]


def test_rounds_are_interleaved_and_start_with_another_candidate() -> None:
    timer, settings, candidates = scripted(3, a=[1.0] * 3, b=[1.0] * 3, c=[1.0] * 3)
    measure("t", candidates, settings=settings, timer=timer)
    assert timer.asked == [*"abc", *"bca", *"cab"]


def test_medians_and_spread() -> None:
    timer, settings, candidates = scripted(5, a=[1.0, 2.0, 3.0, 4.0, 100.0])
    report = measure("t", candidates, settings=settings, timer=timer)
    result = report.result("a")
    assert result.median == 3.0
    assert result.spread == pytest.approx(100 * (4 - 2) / 3)


def test_ratios_are_paired_so_that_drift_cancels() -> None:
    drift = [1.0, 5.0, 2.0, 9.0, 3.0]
    timer, settings, candidates = scripted(5, old=[2 * d for d in drift], new=drift)
    report = measure("t", candidates, settings=settings, timer=timer)
    ratio = report.ratio("old", "new")
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    assert ratio.decided
    assert report.ratio("new", "old").decided


def test_a_ratio_inside_the_noise_decides_nothing() -> None:
    timer, settings, candidates = scripted(4, a=[1.0, 1.2, 0.9, 1.1], b=[1.1, 1.0, 1.0, 1.0])
    assert not measure("t", candidates, settings=settings, timer=timer).ratio("a", "b").decided


def test_rates_follow_from_the_work() -> None:
    work = Work(bytes=4e9, flops=2e12, items=30, item="tokens")
    found = Result("a", (2.0, 2.0), 1, work).to_json(None)
    assert (found["gb_per_s"], found["tflop_per_s"], found["items_per_s"]) == (2.0, 1.0, 15.0)
    assert "of_gemm" not in found
    assert "gb_per_s" not in Result("b", (1.0,), 1, Work()).to_json(None)


def test_calls_rotate_through_the_inputs() -> None:
    seen: list[int] = []
    rotating = Candidate("r", [lambda i=i: seen.append(i) for i in range(3)])  # type: ignore[misc]
    CpuTimer().sample(rotating, 7)
    assert seen == [0, 1, 2, 0, 1, 2, 0]


def test_a_setup_runs_before_each_sample_of_one_call() -> None:
    log: list[str] = []
    both = Candidate("s", [lambda: log.append("run")], setup=lambda: log.append("setup"))
    measure("t", [both], settings=Settings(rounds=3, warmup=1, limits=False))
    assert log == ["setup", "run"] * 4


def test_calls_fill_a_sample() -> None:
    spin = Candidate("x", [lambda: sum(range(2000))])
    timer = CpuTimer()
    calls = timer.calls_for(spin, 0.01)
    assert calls > 10
    assert 0.001 < timer.sample(spin, calls) * calls < 0.2


def test_real_work_is_timed_plausibly() -> None:
    small, large = torch.ones(1000), torch.ones(4_000_000)
    report = measure("sum", [Candidate("s", [small.sum]), Candidate("l", [large.sum])], settings=QUICK)
    assert report.ratio("l", "s").median > 5
    assert report.ratio("l", "s").decided


def test_json_and_table_tell_the_same(tmp_path: Path) -> None:
    timer, _, candidates = scripted(2, first=[0.001, 0.001], second=[0.003, 0.003])
    settings = Settings(rounds=2, warmup=0, limits=False)
    report = measure("demo", candidates, settings=settings, timer=timer)
    report.save(tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    assert data == report.to_json()
    assert [r["median_s"] for r in data["results"]] == [0.001, 0.003]
    assert data["versions"]["torch"] == torch.__version__
    table = report.table().splitlines()
    assert table[-1].split() == ["second", "3.000", "ms", "0.0%", "3.000"]
    assert "demo on " in table[0]


def test_limits_are_measured_and_used() -> None:
    limits = measure_limits("cpu", megabytes=8, size=128)
    assert limits.copy_gb_per_s > 0.1
    assert limits.read_gb_per_s > 0.1
    assert limits.gemm_tflop_per_s > 1e-4
    found = Result("a", (1.0,), 1, Work(bytes=limits.copy_gb_per_s * 1e9 / 2)).to_json(limits)
    assert found["of_copy_bandwidth"] == pytest.approx(0.5)


def test_rotations_outgrow_the_cache() -> None:
    cache = cache_bytes("cpu")
    assert cache > 2**18
    assert rotations(2**20, "cpu") * 2**20 >= 2 * cache
    assert rotations(100 * cache, "cpu") == 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: measure("t", [], settings=QUICK),
        lambda: measure("t", [candidate("a"), candidate("a")], settings=QUICK),
        lambda: Candidate("a", []),
        lambda: Settings(rounds=0),
        lambda: make_timer("cpu", graph=True),
    ],
)
def test_impossible_measurements_are_errors(wrong: object) -> None:
    with pytest.raises(ValueError, match=r".+"):
        wrong()  # type: ignore[operator]


def test_shared_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, rounds=4)
    args = parser.parse_args(["--json", str(tmp_path / "out.json"), "--device", "cpu"])
    assert settings_of(args).rounds == 4
    emit(measure("t", [candidate("a")], settings=QUICK), args)
    assert "candidate" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["title"] == "t"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graph", [False, True])
def test_cuda_timers_agree_with_the_bandwidth(graph: bool) -> None:
    sources = [torch.ones(2**26, device="cuda") for _ in range(2)]
    target = torch.empty_like(sources[0])
    copies = Candidate("copy", [lambda s=s: target.copy_(s) for s in sources])  # type: ignore[misc]
    timer = CudaTimer(torch.device("cuda"), graph=graph)
    timer.sample(copies, 4)
    seconds = timer.sample(copies, 20)
    rate = 2 * target.nbytes / seconds / 1e9
    assert 0.5 < rate / measure_limits("cuda").copy_gb_per_s < 1.5
