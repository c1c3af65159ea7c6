"""How decode deals its work out, against a plain model: every tile once, in order, and every cut merged."""

import itertools
import random

import pytest
import torch

from anyattn.kernels.triton import decode_launch
from anyattn.kernels.triton.attention import Heads
from anyattn.kernels.triton.configs import Decode

BLOCK = 16
HEADS = Heads(2, 1, 16, 16)


def dealt(
    lens: list[int],
    num_ranges: int,
    *,
    window: int | None = None,
    min_tiles: int = 1,
    split: bool = True,
    parts: int = 0,
    tile: int = BLOCK,
) -> tuple[list[list[int]], decode_launch.DecodeStep]:
    """Records of the ranges. Tables are untrimmed: row i is request len - i."""
    batch = len(lens)
    step = decode_launch.DecodeStep.of(
        torch.zeros(1, 4096, dtype=torch.int32),
        torch.arange(batch, 0, -1),
        torch.zeros(batch, dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        window,
        4,
        HEADS,
        Decode(tile, 4, 1, num_ranges, min_tiles, split, parts=parts, unit=BLOCK),
    )
    step.ranges.fill_(-7)
    decode_launch.fill_ranges(step)
    return step.ranges.tolist(), step


def tiles_of(length: int) -> int:
    return max(1, -(-length // BLOCK))


def walk(records: list[list[int]], lens: list[int]) -> dict[int, list[tuple[int, int, int]]]:
    """request -> (range, first tile, tiles) as `decode_kernel` walks."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for r, (b, at, left, requests, *_) in enumerate(records):
        for _ in range(requests):
            count = min(left, tiles_of(lens[b]) - at)
            found.setdefault(b, []).append((r, at, count))
            left, at, b = left - count, 0, b + 1
        assert left == 0 or not requests
    return found


def judged(lens: list[int], num_ranges: int, min_tiles: int = 1) -> list[int]:
    """Checks a deal; the tiles of each range."""
    records, _ = dealt(lens, num_ranges, min_tiles=min_tiles)
    found = walk(records, lens)
    assert sorted(found) == list(range(len(lens)))
    merges = {record[8]: (r, record[9]) for r, record in enumerate(records) if record[9] > 0}
    loads = [0] * num_ranges
    for b, parts in found.items():
        assert parts[0][1] == 0
        for (r, at, count), (next_r, next_at, _) in itertools.pairwise(parts):
            assert (next_r, next_at) == (r + 1, at + count), "in order, in neighbouring ranges"
        assert sum(count for _, _, count in parts) == tiles_of(lens[b])
        assert all(count > 0 for _, _, count in parts)
        for r, _, count in parts:
            loads[r] += count
        if len(parts) > 1:
            assert merges.pop(b) == (parts[0][0], len(parts))
    assert not merges, "a request that isn't cut needs no merge"
    for record in records:
        if record[3]:
            assert record[4:7] == [len(lens) - record[0], 0, lens[record[0]]]
    return loads


@pytest.mark.parametrize("seed", range(12))
def test_every_tile_once(seed: int) -> None:
    rng = random.Random(seed)
    batch, num_ranges = rng.choice([1, 2, 5, 17, 40]), rng.choice([1, 2, 7, 16, 33])
    longest = rng.choice([20, 300, 2000])
    lens = [rng.choice([0, 1, rng.randrange(longest), longest]) for _ in range(batch)]
    judged(lens, num_ranges, min_tiles=rng.choice([1, 2]))


def test_more_requests_than_a_program_sums_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_launch, "_FEW_B", 16)
    monkeypatch.setattr(decode_launch, "_BLOCK_B", 16)
    rng = random.Random(3)
    judged([rng.randrange(200) for _ in range(53)], 9)
    judged([rng.randrange(200) for _ in range(53)], 64)


def test_ranges_are_equal() -> None:
    loads = judged([2000, 16, 16, 700, 5, 1200, 16, 16, 900, 16], 7)
    assert max(loads) - min(loads[:-1]) == 0
    assert loads[-1] <= max(loads)


@pytest.mark.parametrize(
    ("batch", "tiles", "num_ranges"), [(1, 64, 16), (4, 16, 16), (8, 100, 16), (16, 9, 16)]
)
def test_equal_lengths_are_cut_evenly(batch: int, tiles: int, num_ranges: int) -> None:
    """Where ranges can be parts of one request each, they are."""
    records, _ = dealt([tiles * BLOCK] * batch, num_ranges)
    assert {record[3] for record in records} == {1}
    assert {record[2] for record in records} == {tiles * batch // num_ranges}


def test_a_range_has_some_tiles() -> None:
    records, _ = dealt([18 * BLOCK], 12, min_tiles=2)
    assert [record[2] * record[3] for record in records] == [2] * 9 + [0] * 3
    records, _ = dealt([8 * BLOCK], 12, min_tiles=2)
    assert [record[2] * record[3] for record in records] == [1] * 8 + [0] * 4, "one merge of 16 at most"


def test_a_window_skips_to_the_run_with_its_first_key() -> None:
    records, _ = dealt([1000, 30], 2, window=50)
    assert records[0][5:7] == [948, 52], "runs of four tokens"
    assert records[1][5:7] == [0, 30]


@pytest.mark.parametrize(("lens", "parts"), [([1000, 30, 0, 64, 500], 4), ([4000], 16), ([33], 8)])
def test_equal_parts(lens: list[int], parts: int) -> None:
    """Static splits: parts of two tiles or more, in order, some of them empty."""
    records, _ = dealt(lens, len(lens) * parts, min_tiles=2, parts=parts)
    found = walk([[*r[:3], int(r[2] > 0), *r[4:]] for r in records], lens)
    for b, length in enumerate(lens):
        own = records[b * parts : (b + 1) * parts]
        assert sum(record[2] for record in own) == tiles_of(length)
        assert {record[0] for record in own} == {b}
        assert own[0][2] == min(max(-(-tiles_of(length) // parts), 2), tiles_of(length))
        assert [at for _, at, _ in found[b]] == sorted(at for _, at, _ in found[b])
        pieces = sum(record[2] > 0 for record in own)
        assert own[0][8:10] == [b, pieces if pieces > 1 else 0]
        assert all(record[9] == 0 for record in own[1:])


def test_parts_of_less_than_whole_tiles() -> None:
    """33 units of 16 keys: three parts of eleven, where tiles of 64 would make 12, 12 and 9."""
    records, _ = dealt([33 * BLOCK - 5], 3, parts=3, tile=64)
    assert [record[1:3] for record in records] == [[0, 11], [11, 11], [22, 11]]
    records, _ = dealt([6 * BLOCK], 3, parts=3, min_tiles=1, tile=64)
    assert [record[1:3] for record in records] == [[0, 4], [4, 2], [8, 0]], "a tile at least"


def test_uncut_requests_are_ranges() -> None:
    records, step = dealt([1000, 30, 0], 3, split=False)
    assert [record[:2] for record in records] == [[0, 0], [1, 0], [2, 0]]
    assert {record[3] for record in records} == {1}
    assert step.pieces is None
