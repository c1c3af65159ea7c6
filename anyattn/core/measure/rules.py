"""Rules of a route: which backend serves steps of which size, and the nearest rule for any other step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from anyattn.core.arguments import check_number
from anyattn.core.measure.bucket import RUNS, power_of_two
from anyattn.errors import ConfigError

__all__ = ["RouteMap", "RouteRule"]


@dataclass(frozen=True)
class RouteRule:
    """Steps of `requests` x `kv_len` with `new_tokens` each, run so, go to `backend`. Powers of two."""

    run: str
    requests: int
    kv_len: int
    new_tokens: int
    backend: str

    def __post_init__(self) -> None:
        if self.run not in RUNS:
            raise ConfigError("run of a route rule", asked=self.run, allowed=" or ".join(RUNS))
        for name in ("requests", "kv_len", "new_tokens"):
            check_number(f"{name} of a route rule", getattr(self, name))
            object.__setattr__(self, name, power_of_two(getattr(self, name)))


class RouteMap:
    """Looks a step up: by the rules for its run (of the other run where there are none), nearest first.

    Near means few steps of two in requests, KV length and new tokens together; ties go to the earlier rule.
    """

    def __init__(self, default: str, rules: Iterable[RouteRule] = ()) -> None:
        self.default, self.rules = default, tuple(rules)
        own = {run: tuple(rule for rule in self.rules if rule.run == run) for run in RUNS}
        self._of_run = {run: rules or self.rules for run, rules in own.items()}
        self._known: dict[tuple[str, int, int, int], str] = {}

    def backend(self, run: str, requests: float, kv_len: float | None, new_tokens: float) -> str:
        """The backend for a step; the default where the KV length isn't known on the host."""
        if kv_len is None or not self.rules:
            return self.default
        key = (run, power_of_two(requests), power_of_two(kv_len), power_of_two(new_tokens))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._nearest(*key)
        return found

    def _nearest(self, run: str, requests: int, kv_len: int, new_tokens: int) -> str:
        def distance(rule: RouteRule) -> float:
            ratios = (requests / rule.requests, kv_len / rule.kv_len, new_tokens / rule.new_tokens)
            return sum(abs(math.log2(ratio)) for ratio in ratios)

        return min(self._of_run[run], key=distance).backend
