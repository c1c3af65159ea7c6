"""The rules of the *_VISIBLE_DEVICES variables."""

from __future__ import annotations

import pytest

from anyattn.detect.visible import choose, first_set

NAMED = [("GPU-aaaa1111", 0), ("GPU-aaaa2222", 1), ("GPU-bbbb3333", 2), ("MIG-cccc", 3)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("", []),
        ("-1", []),
        ("0,2,-1,1", [0, 2]),
        ("0,7,1", [0]),
        ("0,0", []),
        ("1gpu", [1]),
        ("NoDevFiles", []),
        ("GPU-bbbb3333", [2]),
        ("gpu-bbbb", [2]),
        ("GPU-aaaa", []),
        ("GPU-aaaa2222,0", [1, 0]),
        ("MIG-cccc", [3]),
        ("GPU-dddd", []),
        ("GPU-aaaa1111,GPU-aaaa1111", []),
    ],
)
def test_choose(text: str, expected: list[int]) -> None:
    assert choose(text, [0, 1, 2], NAMED) == expected


def test_numbers_stand_for_positions() -> None:
    assert choose("1,0", [4, 9]) == [9, 4]


def test_an_exact_name_beats_a_longer_one_with_the_same_start() -> None:
    assert choose("GPU-aa", [], [("GPU-aab", 1), ("GPU-aa", 0)]) == [0]


def test_first_set_counts_empty_values() -> None:
    assert first_set({"B": "1", "A": ""}, "A", "B") == ("A", "")
    assert first_set({"B": "1"}, "A", "B") == ("B", "1")
    assert first_set({}, "A", "B") is None
