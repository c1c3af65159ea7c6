"""A day of chats at the attention layer: real lengths, a continuous-batching scheduler, the steps it makes.

Turns arrive as a Poisson process whose rate follows the hour. A turn is a first prompt or a later one on a
cached conversation, with an answer; lengths are drawn, independently of each other, from quantiles of
ShareGPT (`data/bench/sharegpt.toml`). The scheduler is a usual one: waiting prompts go first, several in a
step, in chunks of a token budget, while there is room in the batch; else everybody decodes. What a step takes
is a formula (`step_seconds`), since it decides only how many requests meet. Nothing here is timed; the same
seed gives the same steps.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from anyattn.errors import ConfigError

__all__ = ["Chat", "StepShape", "Turn", "chat_lengths", "contexts", "day", "representatives", "turns"]

Pair = tuple[int, int]
"""Cached and new tokens of a request in a step."""


@functools.cache
def chat_lengths() -> Mapping[str, Any]:
    """The shipped quantiles: `probabilities`, `first_prompt`, `later_prompt`, `cached`, `answer`."""
    text = files("anyattn").joinpath("data/bench/sharegpt.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _draw(name: str, rng: random.Random) -> int:
    """By inverse transform, linear between the quantiles."""
    lengths = chat_lengths()
    at: list[float] = lengths["probabilities"]
    values: list[int] = lengths[name]
    u = rng.random()
    upper = next(i for i, p in enumerate(at) if p >= u and i > 0)
    share = (u - at[upper - 1]) / (at[upper] - at[upper - 1])
    low, high = values[upper - 1], values[upper]
    return max(1, round(low + share * (high - low)))


@dataclass(frozen=True)
class Turn:
    """One request: tokens of it that are cached, new ones of the prompt, and of the answer."""

    cached: int
    prompt: int
    answer: int


def turns(rng: random.Random, max_context: int) -> Iterable[Turn]:
    """Turns without end; a conversation that would exceed `max_context` forgets its beginning."""
    lengths = chat_lengths()
    first = lengths["conversations"] / lengths["turns"]
    while True:
        fresh = rng.random() < first
        prompt = min(_draw("first_prompt" if fresh else "later_prompt", rng), max_context // 2)
        answer = min(_draw("answer", rng), max_context // 4)
        cached = 0 if fresh else min(_draw("cached", rng), max_context - prompt - answer)
        yield Turn(cached, prompt, answer)


def contexts(count: int, seed: int, max_context: int = 8192) -> list[int]:
    """KV tokens of `count` requests that decode: each somewhere in its answer."""
    rng = random.Random(seed)
    drawn = itertools.islice(turns(rng, max_context), count)
    return [t.cached + t.prompt + rng.randrange(t.answer) for t in drawn]


@dataclass(frozen=True)
class Chat:
    """What is simulated. Defaults: a model of about 8 billion parameters on one H200.

    Attributes:
        rate: turns a second, averaged over the day; between `1 - swing` and `1 + swing` of that.
        max_batch, chunk: of the scheduler. weight_bytes, kv_token_bytes, flops_per_token, bandwidth, compute,
            overhead: of `step_seconds`.
        window: seconds of each hour that are simulated, after as many that fill the batch.
    """

    rate: float = 12.0
    swing: float = 0.8
    max_batch: int = 256
    chunk: int = 2048
    max_context: int = 8192
    weight_bytes: float = 16e9
    kv_token_bytes: float = 131072.0
    flops_per_token: float = 16e9
    bandwidth: float = 4.0e12
    compute: float = 5.0e14
    overhead: float = 1e-3
    window: float = 8.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate <= 0 or not 0 <= self.swing <= 1 or min(self.max_batch, self.chunk) < 1:
            raise ConfigError(
                "a day of chats", asked=self, allowed="rate > 0, swing 0 to 1, max_batch and chunk >= 1"
            )

    def hourly_rate(self, hour: int) -> float:
        """Turns a second: quiet at 4 o'clock, busy at 16."""
        return self.rate * (1 - self.swing * math.cos(2 * math.pi * (hour - 4) / 24))

    def step_seconds(self, tokens: int, kv_tokens: int) -> float:
        """Weights and KV read once, or the arithmetic of the tokens, whichever is longer."""
        moved = (self.weight_bytes + kv_tokens * self.kv_token_bytes) / self.bandwidth
        return self.overhead + max(moved, tokens * self.flops_per_token / self.compute)


@dataclass(frozen=True)
class StepShape:
    """Requests of a step, and how many such steps a day has. `kind`: "decode" or "extend"."""

    kind: str
    pairs: tuple[Pair, ...]
    count: float


@dataclass
class _Server:
    """One replica: prompts that wait, requests that decode."""

    chat: Chat
    now: float = 0.0
    decoded: int = 0
    waiting: list[list[int]] = field(default_factory=list)  # cached, new, answer
    running: dict[int, tuple[int, int]] = field(default_factory=dict)  # id -> context at start, step then
    ends: list[tuple[int, int]] = field(default_factory=list)  # last decode step, id
    numbers: Iterable[int] = field(default_factory=itertools.count)

    def step(self) -> tuple[str, tuple[Pair, ...]]:
        """One step: prompts if there are any and there is room, else decode."""
        if self.waiting and len(self.running) < self.chat.max_batch:
            return "extend", self._prefill()
        pairs = tuple((base + self.decoded - at, 1) for base, at in self.running.values())
        self.decoded += 1
        while self.ends and self.ends[0][0] <= self.decoded:
            del self.running[heapq.heappop(self.ends)[1]]
        return "decode", pairs

    def _prefill(self) -> tuple[Pair, ...]:
        budget, pairs = self.chat.chunk, []
        room = self.chat.max_batch - len(self.running)
        while self.waiting and budget and room:
            cached, new, answer = self.waiting[0]
            taken = min(new, budget)
            pairs.append((cached, taken))
            budget -= taken
            if taken < new:
                self.waiting[0] = [cached + taken, new - taken, answer]
                break
            self.waiting.pop(0)
            room -= 1
            self._start(cached + new, answer)
        return tuple(pairs)

    def _start(self, context: int, answer: int) -> None:
        number = next(iter(self.numbers))
        self.running[number] = context, self.decoded
        heapq.heappush(self.ends, (self.decoded + answer, number))


def day(chat: Chat) -> list[StepShape]:
    """Steps of 24 hours: those of a window in each hour, counted for the whole hour."""
    return [step for hour in range(24) for step in _hour(chat, hour)]


def _hour(chat: Chat, hour: int) -> list[StepShape]:
    rng = random.Random(chat.seed * 1000 + hour)
    rate, server = chat.hourly_rate(hour), _Server(chat)
    source = turns(rng, chat.max_context)
    arrival, found = rng.expovariate(rate), []
    warm = 2 * chat.window
    while server.now < warm + chat.window:
        while arrival <= server.now:
            turn = next(iter(source))
            server.waiting.append([turn.cached, turn.prompt, turn.answer])
            arrival += rng.expovariate(rate)
        if not (server.waiting or server.running):
            server.now = arrival
            continue
        kind, pairs = server.step()
        server.now += chat.step_seconds(sum(n for _, n in pairs), sum(p + n for p, n in pairs))
        if server.now >= warm:
            found.append(StepShape(kind, pairs, 3600.0 / chat.window))
    return found


def representatives(steps: Sequence[StepShape], kind: str, count: int) -> list[StepShape]:
    """`count` steps of a kind that stand for all: the middle one of as many strata of equal size, by work."""
    ranked = sorted((s for s in steps if s.kind == kind), key=lambda s: _weight(s.pairs))
    count = min(count, len(ranked))
    found = []
    for index in range(count):
        stratum = ranked[index * len(ranked) // count : (index + 1) * len(ranked) // count]
        middle = stratum[len(stratum) // 2]
        found.append(StepShape(kind, middle.pairs, sum(s.count for s in stratum)))
    return found


def _weight(pairs: Iterable[Pair]) -> float:
    """Keys that are read, weighted by the queries that read them."""
    return sum((p + n) * (1 + n / 64) for p, n in pairs)
