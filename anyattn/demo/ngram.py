"""Prompt look-up drafting: what followed earlier occurrences of the last few tokens, as a tree.

No draft model: the text so far is the draft model (after "prompt lookup decoding", Saxena, 2023). It pays
where a text repeats itself: code, lists, quotations, answers about a given text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from anyattn.core.speculative.tree import TreeBuilder
from anyattn.errors import ConfigError

__all__ = ["NgramDrafter"]


@dataclass(frozen=True)
class NgramDrafter:
    """Looks up the last n tokens, longest n first, latest occurrence first.

    Attributes:
        longest, shortest: lengths of the n-grams that are looked up.
        branches: most continuations that a tree is made of.

    Raises:
        ConfigError: values that can't be.
    """

    longest: int = 4
    shortest: int = 2
    branches: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest or self.branches < 1:
            raise ConfigError(
                "an n-gram drafter (shortest, longest, branches)",
                asked=(self.shortest, self.longest, self.branches),
                allowed="1 <= shortest <= longest, branches >= 1",
                hint="NgramDrafter()",
            )

    def draft(self, tokens: Sequence[int], max_nodes: int, max_depth: int) -> TreeBuilder:
        """A tree of at most `max_nodes` nodes below and with the last of `tokens`, `max_depth` deep.

        The first continuation gets what room the others leave: two nodes each.
        """
        made = TreeBuilder(tokens[-1], max_nodes)
        if made.room <= 0 or max_depth < 1:
            return made
        found = self._continuations(tokens, min(max_depth, max_nodes - 1))
        first, *others = found or [[]]
        made.add(first[: max(1, made.room - 2 * len(others))])
        for path in others:
            made.add(path)
        return made

    def _continuations(self, tokens: Sequence[int], depth: int) -> list[list[int]]:
        """Distinct continuations, none the beginning of another, best first."""
        found: list[list[int]] = []
        for end in self._occurrences(tokens):
            path = list(tokens[end : end + depth])
            if not any(other[: len(path)] == path or path[: len(other)] == other for other in found):
                found.append(path)
                if len(found) == self.branches:
                    break
        return found

    def _occurrences(self, tokens: Sequence[int]) -> Iterator[int]:
        """Where earlier occurrences of the last n tokens end."""
        last = len(tokens)
        for n in range(min(self.longest, last - 1), self.shortest - 1, -1):
            tail = list(tokens[last - n :])
            for end in range(last - 1, n - 1, -1):
                if tokens[end - 1] == tail[-1] and list(tokens[end - n : end]) == tail:
                    yield end
