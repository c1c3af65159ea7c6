"""Block lists against the dense mask that they summarise."""

from __future__ import annotations

import random

import pytest
import torch

from anyattn.backends.portable.flex_blocks import Keys, Tiles, block_lists, pages_at, tile_queries
from anyattn.core.spec import AttentionKind

_CPU = torch.device("cpu")


def _dense(blocks_mask: object, tiles: int, rows: int, keys: int) -> torch.Tensor:
    n, q, k = torch.meshgrid(torch.arange(tiles), torch.arange(rows), torch.arange(keys), indexing="ij")
    seen: torch.Tensor = blocks_mask(n, torch.zeros_like(n), q, k)  # type: ignore[operator]
    return seen


@pytest.mark.parametrize("kind", [AttentionKind.CAUSAL, AttentionKind.BIDIRECTIONAL])
@pytest.mark.parametrize("window", [None, 1, 9, 33])
@pytest.mark.parametrize("paged", [True, False])
def test_lists_cover_what_is_seen_and_full_blocks_are_full(
    kind: AttentionKind, window: int | None, paged: bool
) -> None:
    rng = random.Random(f"{kind}{window}{paged}")
    for _ in range(12):
        count, page = rng.randint(1, 4), 16
        extend = [rng.randint(0, 40) for _ in range(count)]
        extend[0] = extend[0] or 3
        prefix = torch.tensor([rng.randint(0, 60) for _ in range(count)], dtype=torch.int32)
        end = prefix + torch.tensor(extend, dtype=torch.int32)
        first = (prefix - ((window or 1000) - 1)).clamp_min(0)
        start = (first - first % page).int() if paged else first.int()
        rows = 16 if paged else -(-max(extend) // 16) * 16
        tiles = tile_queries(extend, sum(extend), rows, _CPU, one_each=not paged)
        keys, total = _keys(rng, start, end, page, paged)
        blocks = block_lists(tiles, prefix, keys, kind, window, 16)
        seen = _dense(blocks.mask_mod, tiles.request.shape[0], rows, total)
        _check(blocks.partial, blocks.full, seen, tiles, page)


def _keys(
    rng: random.Random, start: torch.Tensor, end: torch.Tensor, page: int, paged: bool
) -> tuple[Keys, int]:
    widest = max(1, -(-int((end - start).max()) // page))
    if not paged:
        return Keys(start, end, page, widest), widest * page
    num_pages = end.shape[0] * widest + 3
    order = list(range(num_pages))
    rng.shuffle(order)
    table = torch.tensor(order[: end.shape[0] * widest], dtype=torch.int32).view(-1, widest)
    pages = pages_at(table, start, end - start, page, num_pages)
    return Keys(start, end, page, widest, table, pages), num_pages * page


def _check(
    partial: tuple[torch.Tensor, torch.Tensor], full: tuple[torch.Tensor, torch.Tensor], seen: torch.Tensor,
    tiles: Tiles, page: int,
) -> None:  # fmt: skip
    for n in range(seen.shape[0]):
        for span in range(-(-seen.shape[1] // 16)):
            rows = seen[n, span * 16 : span * 16 + 16]
            used = rows[: max(0, int(tiles.count[n]) - span * 16)]
            some = {int(k) // page for k in used.any(0).nonzero()}
            listed = partial[1][n, 0, span, : int(partial[0][n, 0, span])].tolist()
            whole = full[1][n, 0, span, : int(full[0][n, 0, span])].tolist()
            assert len(listed) == len(set(listed))
            assert not set(listed) & set(whole)
            assert some <= set(listed) | set(whole)
            for block in whole:
                assert bool(used[:, block * page : (block + 1) * page].all())


def test_tiles_hold_each_token_once_and_no_two_requests() -> None:
    tiles = tile_queries([5, 0, 33, 1], 41, 16, _CPU, one_each=False)
    assert tiles.request.tolist() == [0, 2, 2, 2, 3]
    assert tiles.first.tolist() == [0, 0, 16, 32, 0]
    assert tiles.count.tolist() == [5, 16, 16, 1, 1]
    x = torch.arange(41)[:, None, None].float()
    split = tiles.split(x)
    assert split.shape == (5, 16, 1, 1)
    assert split[0, :, 0, 0].tolist() == [0, 1, 2, 3, 4] + [4] * 11
    # Two tokens of padding at the end belong to nobody and read some row.
    assert torch.equal(tiles.join(split)[:39], x[:39])


def test_pages_are_numbered_in_each_request_alone() -> None:
    table = torch.tensor([[7, 3, 0], [3, 5, 2]], dtype=torch.int32)
    start, lens = torch.tensor([0, 32], dtype=torch.int32), torch.tensor([20, 48], dtype=torch.int32)
    pages = pages_at(table, start, lens, 16, 8)
    assert pages[0].tolist() == [-1, -1, -1, 1, -1, -1, -1, 0, -1]
    assert pages[1].tolist() == [-1, -1, 4, 2, -1, 3, -1, -1, -1]
