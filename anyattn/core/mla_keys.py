"""Which keys a materialised step expands together: new tokens in one part, prefixes in bounded chunks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from anyattn.core.metadata.upload import Uploader

__all__ = ["KeyPart", "MLAKeys", "key_parts", "prefix_chunks"]


@dataclass(eq=False)
class KeyPart:
    """Tokens `starts[i] .. starts[i] + lens[i]` of each request, one request after another.

    Attributes:
        lens, bounds: host lengths `[B]` and their offsets `[B + 1]`. offsets: int32 `[B + 1]` on the device.
        longest: the largest length. slots: int64 `[total]`, filled once a step.
    """

    lens: list[int]
    bounds: list[int]
    starts: torch.Tensor
    offsets: torch.Tensor
    slots: torch.Tensor

    @property
    def total(self) -> int:
        """Keys of all requests."""
        return self.bounds[-1]

    @property
    def longest(self) -> int:
        """Keys of the request that has most here."""
        return max(self.lens, default=0)

    def fill(self, req_to_token: torch.Tensor, rows: torch.Tensor) -> None:  # anyattn: in-graph
        """Slots from the request table; no host sync."""
        count = rows.shape[0]
        index = torch.arange(self.total, device=rows.device)
        request = torch.searchsorted(self.offsets[1:].long(), index, right=True).clamp_max(max(0, count - 1))
        column = index - self.offsets[request] + self.starts[request]
        self.slots.copy_(req_to_token[rows[request], column])


@dataclass(frozen=True, eq=False)
class MLAKeys:
    """All keys of a materialised step: `prefix` parts see no causal rule, `new` stands beside the queries."""

    new: KeyPart
    prefix: tuple[KeyPart, ...]


def key_parts(parts: Sequence[tuple[Sequence[int], Sequence[int]]], uploader: Uploader) -> list[KeyPart]:
    """A part for each `(starts, lens)` of host lengths, all in one upload."""
    bounds = [[0, *itertools.accumulate(lens)] for _, lens in parts]
    pairs = [(starts, ends) for (starts, _), ends in zip(parts, bounds, strict=True)]
    given = [torch.tensor(values, dtype=torch.int64, device="cpu") for pair in pairs for values in pair]
    device = uploader.upload(given)
    return [
        KeyPart(
            list(lens),
            ends,
            device[2 * i],
            device[2 * i + 1].to(torch.int32),
            torch.empty(ends[-1], dtype=torch.int64, device=uploader.device),
        )
        for i, ((_, lens), ends) in enumerate(zip(parts, bounds, strict=True))
    ]


def prefix_chunks(prefix_lens: Sequence[int], limit: int) -> Iterator[tuple[list[int], list[int]]]:
    """`(starts, lens)` per request of each chunk of at most `limit` tokens, in request order.

    Every prefix token is in exactly one chunk.
    """
    starts, lens = [0] * len(prefix_lens), [0] * len(prefix_lens)
    room = limit
    for request, length in enumerate(prefix_lens):
        done = 0
        while done < length:
            taken = min(room, length - done)
            starts[request], lens[request] = done, taken
            done, room = done + taken, room - taken
            if room == 0:
                yield starts, lens
                starts, lens, room = [0] * len(prefix_lens), [0] * len(prefix_lens), limit
    if any(lens):
        yield starts, lens
