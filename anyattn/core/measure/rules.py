"""Rules of a route: which backend serves steps of which size, and the nearest rule for any other step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from anyattn.core.arguments import check_number
from anyattn.core.measure.bucket import RUNS, power_of_two, size_text
from anyattn.errors import ConfigError

__all__ = ["RouteMap", "RouteRule"]


@dataclass(frozen=True)
class RouteRule:
    """Steps of `requests` x `kv_len` with `new_tokens` each, run so, go to `backend`. Powers of two.

    `prompts`: of a mixed step, whose `new_tokens` are theirs; 0 in others.
    """

    run: str
    requests: int
    kv_len: int
    new_tokens: int
    backend: str
    prompts: int = 0

    def __post_init__(self) -> None:
        if self.run not in RUNS:
            raise ConfigError("run of a route rule", asked=self.run, allowed=" or ".join(RUNS))
        for name in ("requests", "kv_len", "new_tokens", "prompts"):
            check_number(f"{name} of a route rule", getattr(self, name))
            if name != "prompts" or self.prompts:
                object.__setattr__(self, name, power_of_two(getattr(self, name)))

    def __str__(self) -> str:
        return size_text(self.requests, self.kv_len, self.new_tokens, self.prompts)

    def distance(self, requests: int, kv_len: int, new_tokens: int, prompts: int) -> float:
        """Steps of two to a step, summed over the counts; prompts only where both have some."""
        ratios = [requests / self.requests, kv_len / self.kv_len, new_tokens / self.new_tokens]
        if prompts and self.prompts:
            ratios.append(prompts / self.prompts)
        return sum(abs(math.log2(ratio)) for ratio in ratios)


class RouteMap:
    """Looks a step up: by the rules for its run (of the other run where there are none), nearest first.

    Near means few steps of two in requests, KV length, new tokens and prompts together; ties go to the
    earlier rule.
    """

    def __init__(self, default: str, rules: Iterable[RouteRule] = ()) -> None:
        self.default, self.rules = default, tuple(rules)
        own = {run: tuple(rule for rule in self.rules if rule.run == run) for run in RUNS}
        self._of_run = {run: rules or self.rules for run, rules in own.items()}
        self._known: dict[tuple[str, int, int, int, int], RouteRule] = {}

    def backend(
        self, run: str, requests: float, kv_len: float | None, new_tokens: float, prompts: float = 0
    ) -> str:
        """The backend for a step; the default where the KV length isn't known on the host."""
        rule = self.rule(run, requests, kv_len, new_tokens, prompts)
        return self.default if rule is None else rule.backend

    def rule(
        self, run: str, requests: float, kv_len: float | None, new_tokens: float, prompts: float = 0
    ) -> RouteRule | None:
        """The rule that decides a step; None where none can."""
        if kv_len is None or not self.rules:
            return None
        sizes = power_of_two(requests), power_of_two(kv_len), power_of_two(new_tokens)
        key = (run, *sizes, power_of_two(prompts) if prompts else 0)
        found = self._known.get(key)
        if found is None:
            rules = self._of_run[run]
            found = self._known[key] = min(rules, key=lambda rule: rule.distance(*key[1:]))
        return found
