"""What `make demo` shows: the machine, the decision, four texts from one continuous batch, the speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from anyattn.core.batch import ForwardMode
from anyattn.demo.engine import Engine
from anyattn.demo.session import Answer, Session

__all__ = ["PROMPTS", "FirstText", "after", "before", "statistics"]

_VALLEY = (
    "The valley of Arven lies between two ranges of low green hills, a day's walk from the sea. For three "
    "hundred years its people have kept bees, and every house has a row of white hives along its southern "
    "wall. In spring the whole valley smells of apple blossom; in autumn the honey is carried down to the "
    "harbour in stone jars, and sold to ships from eleven countries. "
)
PROMPTS = (
    "The capital of France is",
    "A short poem about the sea:\n",
    _VALLEY + "The oldest beekeeper in the valley",
    _VALLEY + "Last summer, a stranger came",
)
"""Two of the four share a long prefix: its pages are computed once."""

_PREFILL = (ForwardMode.EXTEND, ForwardMode.MIXED)


def before(engine: Engine, session: Session) -> Iterator[str]:
    """The machine in a line, the decision in a few."""
    host = engine.decision.host
    cores = f", {torch.get_num_threads()} threads" if engine.pool.device.type == "cpu" else ""
    yield (
        f"Machine: {host.device_name or host.target} ({host.target}{cores}), torch {torch.__version__}; "
        f"weights loaded in {session.load_seconds:.1f} s"
    )
    lines = str(engine.decision).splitlines()
    pool = next((i for i, line in enumerate(lines) if line.startswith("  KV pool")), len(lines) - 1)
    yield "Decision (all of it, with what was not chosen and why: `anyattn select`)"
    yield from lines[1 : pool + 1]
    yield f"Graphs: {engine.graphs_note}"


class FirstText:
    """Prints the first prompt's answer while it grows, so that a slow machine shows signs of life."""

    def __init__(self, prompt: str) -> None:
        self.printed = ""
        self._title = f"\n[1] {_shortened(' '.join(prompt.split()))}\n    "

    def __call__(self, text: str) -> None:
        """Print what `text` has beyond what was printed."""
        text = text.lstrip()
        fresh = text[len(self.printed) :].replace("\n", "\n    ")
        print(fresh if self.printed else self._title + fresh, end="", flush=True)
        self.printed = text


def after(answers: Sequence[Answer], session: Session, *, shown: int = 0) -> Iterator[str]:
    """The texts but for the first `shown`, then the speed and what prefix reuse saved."""
    assert session.engine is not None
    for index, answer in list(enumerate(answers, 1))[shown:]:
        prompt = _shortened(" ".join(answer.prompt.split()))
        yield ""
        yield f"[{index}] {prompt}"
        yield "    " + answer.text.strip().replace("\n", "\n    ")
    found = statistics(session.engine, answers)
    yield ""
    yield (
        f"Prefill  {found['prefill_tokens_per_s']:.0f} tokens/s  "
        f"({found['prefill_tokens']} tokens in {found['prefill_steps']} extend and mixed steps)"
    )
    yield (
        f"Decode   {found['decode_tokens_per_s']:.0f} tokens/s  "
        f"({found['decode_tokens']} tokens in {found['decode_steps']} decode steps)"
    )
    yield (
        f"Prefix reuse saved {found['reused_tokens']} of {found['prompt_tokens']} prompt tokens; "
        f"first token {session.first_token_seconds:.2f} s after the requests came in"
    )


def _shortened(prompt: str, width: int = 60) -> str:
    """The end of a long prompt, from a word on."""
    return prompt if len(prompt) <= width else f"… {prompt[-width:].partition(' ')[2]}"


def statistics(engine: Engine, answers: Sequence[Answer]) -> dict[str, Any]:
    """Counts and rates. A mixed step's decode tokens count with its prefill: it was one computation."""
    prefill, decode = engine.stats.of(*_PREFILL), engine.stats.of(ForwardMode.DECODE)
    return {
        "prefill_tokens": prefill.tokens,
        "prefill_steps": prefill.steps,
        "prefill_tokens_per_s": prefill.tokens_per_second,
        "decode_tokens": decode.tokens,
        "decode_steps": decode.steps,
        "decode_tokens_per_s": decode.tokens_per_second,
        "prompt_tokens": sum(len(a.prompt_ids) for a in answers),
        "reused_tokens": sum(a.completion.reused_tokens for a in answers),
        "preemptions": engine.scheduler.preemptions,
        "graphs": engine.graphs_note,
    }
