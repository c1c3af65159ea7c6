"""The reference continuations of the demo model, and what it means to agree with them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REFERENCE_FILE = Path(__file__).with_name("reference.json")
TIE = 2e-3  # two best logits of the reference closer than this: either may be taken

_LIBRARY = (
    "The town library opened in the spring of 1911, in a narrow brick house between the bakery and the "
    "post office. It began with four hundred books, most of them given by a retired sea captain, and a "
    "single reading lamp. Over the years it grew: a children's room was added in 1934, a map collection in "
    "1952, and in 1987 the whole house was rebuilt around a glass courtyard with a walnut tree in the "
    "middle. Today it lends out more than ninety thousand books a year. "
)
REFERENCE_PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "1, 1, 2, 3, 5, 8, 13,",
    "def fibonacci(n):\n    ",
    "Grüße aus Köln! Übersetzung:",
    _LIBRARY + "On Saturdays",
    _LIBRARY + "The oldest reader",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
)


@dataclass(frozen=True)
class Case:
    """One prompt and its greedy continuation by transformers; `gaps[i]`: between step i's two best logits."""

    prompt: str
    prompt_ids: list[int]
    ids: list[int]
    gaps: list[float]
    text: str


def cases() -> list[Case]:
    """All reference cases."""
    return [Case(**case) for case in json.loads(REFERENCE_FILE.read_text(encoding="utf-8"))["cases"]]


def assert_agrees(case: Case, ids: Sequence[int], label: str = "") -> None:
    """`ids` are the reference's, up to a step where the reference itself was within `TIE` of another."""
    expected = case.ids[: len(ids)]
    for index, (got, want) in enumerate(zip(ids, expected, strict=True)):
        if got == want:
            continue
        where = f"{label} {case.prompt[:30]!r} step {index}: {got} instead of {want}, gap {case.gaps[index]}"
        assert case.gaps[index] < TIE, where
        warnings.warn(f"a tie went the other way: {where}", stacklevel=2)
        return
