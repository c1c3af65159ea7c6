"""Comparisons of times: geometric means, noise, order; versions that count as one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyattn.core.measure import Timing
from anyattn.core.measure.compare import NOISE_FLOOR, compare, fastest, noise, order
from anyattn.core.measure.versions import differing, same_release

NAMES = ("a", "b", "c", "d")
TIMES = st.dictionaries(
    st.sampled_from(NAMES), st.builds(Timing, st.floats(1e-6, 1.0), st.floats(0.0, 0.3)), min_size=2
)


def test_ratios_are_geometric_and_over_common_buckets() -> None:
    entries = [
        {"a": Timing(1.0), "b": Timing(2.0)},
        {"a": Timing(8.0), "b": Timing(1.0)},
        {"a": Timing(1.0)},
    ]
    found = compare("a", "b", entries)
    assert found is not None
    assert (found.ratio, found.lowest, found.highest, found.buckets) == (pytest.approx(2.0), 0.5, 8.0, 2)
    assert found.slower
    assert not found.faster
    assert compare("a", "c", entries) is None


def test_one_loud_bucket_does_not_drown_the_rest() -> None:
    entries = [{"a": Timing(1.0), "b": Timing(1.2)}] * 4 + [{"a": Timing(1.0, 9.0), "b": Timing(1.2)}]
    found = compare("a", "b", entries)
    assert found is not None
    assert found.noise == NOISE_FLOOR
    assert found.faster


def test_the_noise_has_a_floor() -> None:
    assert noise(Timing(1.0), Timing(1.0)) == 0.02
    assert noise(Timing(1.0, 0.05), Timing(1.0, 0.01)) == 0.05


def test_nobody_wins_a_bucket_alone() -> None:
    assert fastest({"a": Timing(1.0)}, ["a", "b"]) is None
    assert fastest({"a": Timing(1.0), "b": Timing(1.01)}, ["b", "a"]) == "b"
    assert fastest({"a": Timing(1.0), "b": Timing(1.05)}, ["b", "a"]) == "a"


@given(entries=st.lists(TIMES, min_size=1, max_size=5), preferred=st.permutations(NAMES))
def test_the_order_is_total_and_nobody_in_front_is_slower(
    entries: list[dict[str, Timing]], preferred: list[str]
) -> None:
    found = order(preferred, entries)
    assert sorted(found) == sorted(preferred)
    if all(len(times) == len(NAMES) for times in entries):  # everybody ran everywhere
        best = compare(found[0], min(preferred, key=lambda n: _mean(n, entries)), entries)
        assert best is not None
        assert not best.slower


def _mean(name: str, entries: list[dict[str, Timing]]) -> float:
    product = 1.0
    for times in entries:
        product *= times[name].seconds ** (1 / len(entries))
    return product


@given(times=TIMES, preferred=st.permutations(NAMES))
def test_equal_within_noise_means_the_preferred_one(times: dict[str, Timing], preferred: list[str]) -> None:
    winner = fastest(times, preferred)
    assert winner in times
    best = min(times.values(), key=lambda t: t.seconds)
    assert times[winner].seconds <= best.seconds * (1 + noise(times[winner], best)) * 1.0001
    for name in preferred[: preferred.index(winner)]:
        if name in times:
            assert times[name].seconds > best.seconds, "who is preferred and fastest isn't passed over"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2.13.0+cpu", "2.13.1", True),
        ("0.7.2.post1", "0.7.9rc1", True),
        ("0.7.2", "0.8.0", False),
        ("3", "3.0.1", True),
        ("devel", "devel", True),
        ("devel", "1.0", False),
    ],
)
def test_releases_agree_in_major_and_minor(one: str, other: str, same: bool) -> None:
    assert same_release(one, other) is same
    assert bool(differing({"x": one}, {"x": other, "y": "1"})) is not same
