"""Named rows and slots: what is refused is named, and leaves nothing behind for the lists after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from anyattn.core.metadata import slots as module
from anyattn.core.metadata.slots import RowCheck, SlotCheck
from anyattn.errors import BatchError

PAGE, TOTAL = 4, 64


@pytest.fixture(params=[True, False], ids=["numpy", "torch"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], SlotCheck]:
    monkeypatch.setattr(module, "_has_numpy", lambda: request.param)
    return lambda total: SlotCheck(PAGE, total)


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ([3, 9], "page 0"),
        ([0], "page 0"),
        ([9, -1], "page 0"),
        ([-64], "page 0"),
        ([-63, 9], "page 0"),
        ([-65, 9], "page 0"),
        ([9, 64], "beyond the pool"),
        ([9, 127], "beyond the pool"),
        ([9, 128], "beyond the pool"),
        ([9, 10, 9], "twice"),
        ([2, 9, 1 << 40], "page 0"),
        ([1 << 40, 2], "page 0"),
        ([9, 1 << 40], "beyond the pool"),
    ],
)
def test_a_refused_list_does_not_spoil_the_next(
    slots: list[int], said: str, made: Callable[[int], SlotCheck]
) -> None:
    check = made(TOTAL)
    check.check("slots", torch.tensor([63, 4, 20]))
    for _ in range(2):
        with pytest.raises(BatchError, match=said):
            check.check("slots", torch.tensor(slots))
        check.check("slots", torch.tensor([20, 63, 4, 5]))
        check.check("slots", torch.tensor([4]))


@pytest.mark.parametrize("first", [[9, 10], [9, -1], [9, 64], [3, 9], []])
def test_the_first_list_is_checked_like_the_others(
    first: list[int], made: Callable[[int], SlotCheck]
) -> None:
    check = made(TOTAL)
    if not first or first == [9, 10]:
        check.check("slots", torch.tensor(first, dtype=torch.int64))
        return
    with pytest.raises(BatchError):
        check.check("slots", torch.tensor(first))


def test_slots_that_lie_apart(made: Callable[[int], SlotCheck]) -> None:
    check, apart = made(TOTAL), torch.tensor([[9, 2], [11, 2]]).t()
    check.check("slots", apart[0])
    with pytest.raises(BatchError, match="page 0"):
        check.check("slots", apart[1])


def test_lists_of_every_length(made: Callable[[int], SlotCheck]) -> None:
    check = made(1000)
    for count in (0, 1, 900, 3, 996, 500):
        check.check("slots", torch.randperm(996)[:count] + PAGE)
    for count in range(1, 600):  # more lengths than are kept
        check.check("slots", torch.arange(PAGE, PAGE + count))


def test_rows_of_the_table() -> None:
    rows = RowCheck(8)
    for inside in ([], [0], [7, 0, 7], list(range(8))):
        assert rows.inside(torch.tensor(inside, dtype=torch.int64))
        for outside in (-1, 8, 1 << 40, -(1 << 40)):
            assert not rows.inside(torch.tensor([*inside, outside]))
    assert all(rows.inside(torch.zeros(count, dtype=torch.int64)) for count in range(600))


def test_a_right_list_is_not_refused_for_what_another_thread_noted(made: Callable[[int], SlotCheck]) -> None:
    check = made(TOTAL)
    check.check("loc", torch.tensor([9, 10]))
    check._notes[1] = 1  # a list with a slot of the sink is about to be refused elsewhere
    check.check("loc", torch.tensor([9, 11]))
