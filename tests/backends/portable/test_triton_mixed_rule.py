"""When requests with few rows get a kernel of their own, by the lengths of a step; nothing runs."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton", reason="the portable extra isn't installed")

from anyattn.backends.portable.triton_verify import FEW_KEYS, _busiest, _worthwhile
from anyattn.core.host_lengths import Exact
from anyattn.kernels.triton.attention import Heads

HEADS, WIDE = Heads(32, 8, 128, 128), Heads(64, 8, 128, 128)
LEAST = FEW_KEYS * 132 * 1024
_rng = random.Random(3)
CHATS = [_rng.randrange(40, 5000) for _ in range(126)]


def worthwhile(
    prefix: list[int], new: list[int], heads: Heads = HEADS, *, window: int | None = None, exact: bool = True
) -> bool:
    lens = torch.tensor(new)
    known = Exact(torch.tensor(prefix) + lens, lens) if exact else None
    batch = SimpleNamespace(exact=known, num_decode=sum(n == 1 for n in new))
    plan = SimpleNamespace(batch=batch, max_q_len=max(new), key=SimpleNamespace(num_tokens=sum(new)))
    group = SimpleNamespace(table=SimpleNamespace(window=window))
    return _worthwhile(cast("Any", plan), cast("Any", group), heads, 16 // heads.group, 132, LEAST, 1.03)


@pytest.mark.parametrize(
    ("prefix", "new", "heads", "split"),
    [
        ([600, 3300, *CHATS], [1024, 1024] + [1] * 126, HEADS, True),
        ([16_000] * 5 + [900] * 11, [1024] + [1] * 15, HEADS, True),
        ([100] * 31 + [60_000], [512] + [1] * 31, HEADS, True),
        ([4096] * 64, [2048] + [1] * 63, HEADS, False),
        ([8192] * 32, [512] * 4 + [1] * 28, WIDE, False),
        ([100] * 32, [2048] + [1] * 31, HEADS, False),
        ([4096] * 8, [512] * 8, HEADS, False),
        ([4096] * 8, [4] * 8, HEADS, False),
    ],
    ids=["chats", "four long", "one long", "equal", "equal, wide", "short", "chunks", "few alone"],
)
def test_steps_are_split_where_row_blocks_leave_programs_idle(
    prefix: list[int], new: list[int], heads: Heads, split: bool
) -> None:
    assert worthwhile(prefix, new, heads) is split


def test_windows_leave_little_to_read() -> None:
    assert worthwhile([16_000] * 5 + [900] * 11, [1024] + [1] * 15)
    assert not worthwhile([16_000] * 5 + [900] * 11, [1024] + [1] * 15, window=128)


def test_unknown_lengths_are_split_by_numbers() -> None:
    assert worthwhile([0] * 128, [1024, 1024] + [1] * 126, exact=False)
    assert not worthwhile([0] * 8, [1024, 1024] + [1] * 6, exact=False)
    assert not worthwhile([0] * 32, [4096, 4096] + [1] * 30, exact=False)


@pytest.mark.parametrize("window", [None, 300])
def test_the_busiest_program_is_that_of_the_dealing(window: int | None) -> None:
    """Row blocks one by one, as the kernel's programs take them."""
    new, prefix, units, tokens = [70, 1, 0, 200, 33, 1], [500, 90, 8, 1000, 0, 2000], 7, 32
    blocks = []
    for cached, count in zip(prefix, new, strict=True):
        for first in range(0, count, tokens):
            seen = cached + min(first + tokens, count)
            if window is not None:
                seen = min(seen, window + tokens)
            blocks.append(-(-seen // 128) + 2)
    load = [0] * units
    for item in range(len(blocks) * 8):
        turn, at = divmod(item, units)
        load[at if turn % 2 == 0 else units - 1 - at] += blocks[len(blocks) - 1 - item // 8]
    lens = torch.tensor(new)
    assert _busiest(lens, torch.tensor(prefix) + lens, window, HEADS, units) == max(load)
