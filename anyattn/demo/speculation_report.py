"""What drafts were worth: acceptance and speed beside plain decoding of the same prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from anyattn.core.batch import ForwardMode
from anyattn.demo.engine import Engine, EngineConfig
from anyattn.demo.sampler import SamplingParams
from anyattn.demo.session import Answer, Session
from anyattn.demo.speculative import SpeculativeEngine

__all__ = ["beside_plain", "lines"]


def beside_plain(
    session: Session, answers: Sequence[Answer], params: SamplingParams, config: EngineConfig, *, chat: bool
) -> dict[str, Any]:
    """Run the prompts again without drafts; counts and rates of both. `session.engine` stays as it was."""
    drafted = session.engine
    assert isinstance(drafted, SpeculativeEngine)
    prompts = [answer.prompt for answer in answers]
    plain = session.complete(prompts, params, replace(config, draft_tokens=0), chat=chat)
    assert session.engine is not None
    stats = drafted.speculation
    found = {
        "draft_tokens": config.draft_tokens,
        "verify_steps": stats.steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance": stats.acceptance,
        "tokens_per_verified_request": stats.tokens_per_row,
        "tokens_per_s": _speed(drafted),
        "plain_tokens_per_s": _speed(session.engine),
        "same_text": [a.ids for a in plain] == [a.ids for a in answers],
    }
    session.engine = drafted
    return found


def _speed(engine: Engine) -> float:
    """New tokens a second of decode and verify steps; mixed steps, which prefill too, aren't counted."""
    decode = engine.stats.of(ForwardMode.DECODE)
    tokens, seconds = decode.tokens, decode.seconds
    if isinstance(engine, SpeculativeEngine):
        tokens += engine.speculation.tokens
        seconds += engine.speculation.seconds
    return tokens / seconds if seconds else 0.0


def lines(found: dict[str, Any]) -> Iterator[str]:
    """`beside_plain` in words."""
    speed, plain = found["tokens_per_s"], found["plain_tokens_per_s"]
    yield (
        f"Drafts   {found['accepted']} of {found['drafted']} accepted ({found['acceptance']:.0%}); "
        f"{found['tokens_per_verified_request']:.2f} tokens from each verified request and step"
    )
    yield (
        f"Speed    {speed:.1f} tokens/s with drafts, {plain:.1f} without "
        f"({speed / plain if plain else 0.0:.2f} times); "
        f"the text is {'the same' if found['same_text'] else 'NOT the same'}"
    )
