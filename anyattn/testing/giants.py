"""Large pinned cases of a full run: many requests, long contexts, at the edges of pages and splits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anyattn.testing.cases import Case
from anyattn.testing.pins import Shape

__all__ = ["giant_cases"]

_LONGEST = 128 * 1024
_PAGES = (1, 16, 64)


def giant_cases(shape: Shape, axes: dict[str, list[Any]]) -> Iterator[tuple[str, Case]]:
    """(name, case): up to 1,024 requests and 131,072 tokens, for every exact dtype and common page."""
    exact = [d for d in axes["dtypes"] if d[0] == d[1]]
    pages = [p for p in _PAGES if p in axes["page"]]
    for index, (model, kv) in enumerate(exact):
        for page in pages:
            common = {"dtype": model, "kv_dtype": kv, "page_size": page, "seed": 100 + index}
            for count in (256, 1024):
                yield f"{count} requests", _decode(shape, [1 + 7 * i % 97 for i in range(count)], common)
            yield f"{_LONGEST} tokens", _decode(shape, [_LONGEST], common)
            lens = [_LONGEST - 1, 1, 65 * page + 1, 4097]
            yield "lengths far apart", _decode(shape, lens, common)
            new = {"prefix_lens": (32768, 1000 * page - 1, 0), "extend_lens": (17, 33, 300)}
            yield "long prefixes", shape.case(**new, **common)
            many = tuple(i % 5 for i in range(1024))
            yield "1024 short extends", shape.case(prefix_lens=many, extend_lens=(1, 2) * 512, **common)


def _decode(shape: Shape, lens: list[int], common: dict[str, Any]) -> Case:
    prefix = tuple(n - 1 for n in lens)
    return shape.case(mode="decode", prefix_lens=prefix, extend_lens=(1,) * len(lens), **common)
