"""Prompts of the Gemma-3 reference, longer than its window of 512, and what it means to agree with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GEMMA_FILE = Path(__file__).with_name("gemma_reference.json")
TIE = 2e-3  # two best logits of the reference closer than this: either may be taken

_PLACES = ("harbour", "mill", "observatory", "orchard", "station", "quarry", "library", "lighthouse")
_PEOPLE = ("Anna", "Bertram", "Clara", "Dorian", "Edith", "Felix", "Greta", "Hugo", "Irma", "Jonas", "Klara")
_DEEDS = (
    "counted the boats that came in before the storm",
    "repaired the old clock with a spring made of copper",
    "wrote down the names of the stars in a blue notebook",
    "sold apples and told stories about the winter of the great flood",
    "waited for a letter that had been sent from the other side of the sea",
    "found a key that fitted none of the doors in the town",
    "painted the walls white and the window frames green",
)


def diary(entries: int) -> str:
    """A text that never repeats a sentence, so that what fell out of the window matters."""
    lines = [
        f"Day {day}. {_PEOPLE[day % 11]} went to the {_PLACES[day % 8]} and {_DEEDS[day % 7]}."
        for day in range(1, entries + 1)
    ]
    return "This is the diary of a small town by the sea. " + " ".join(lines) + f" Day {entries + 1}."


PROMPTS = {"past_512": (21, 64), "past_1024": (43, 64), "prompt_beyond_1024": (60, 24)}
"""Name -> entries of the diary, new tokens."""


def gemma_cases() -> dict[str, dict[str, Any]]:
    """`prompt_ids`, `ids`, `gaps` of each case."""
    return dict(json.loads(GEMMA_FILE.read_text(encoding="utf-8"))["cases"])


def assert_same_ids(case: dict[str, Any], ids: list[int], label: str) -> int:
    """Equal ids up to a step where the reference itself was undecided; how many were compared."""
    for index, (got, want) in enumerate(zip(ids, case["ids"], strict=True)):
        if got != want:
            where = f"{label} step {index}: {got} instead of {want}, gap {case['gaps'][index]}"
            assert case["gaps"][index] < TIE, where
            return index
    return len(ids)
