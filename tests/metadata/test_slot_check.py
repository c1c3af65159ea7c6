"""Written slots: what is refused is named, and leaves nothing behind for the lists after it."""

from __future__ import annotations

import pytest
import torch

from anyattn.core.metadata.slots import SlotCheck
from anyattn.errors import BatchError

PAGE, TOTAL = 4, 64


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ([3, 9], "page 0"),
        ([0], "page 0"),
        ([9, -1], "page 0"),
        ([9, 64], "beyond the pool"),
        ([9, 10, 9], "twice"),
        ([2, 9, 1 << 40], "page 0"),
        ([1 << 40, 2], "page 0"),
    ],
)
def test_a_refused_list_does_not_spoil_the_next(slots: list[int], said: str) -> None:
    check = SlotCheck(PAGE, TOTAL)
    check.check("slots", torch.tensor([63, 4, 20]))
    for _ in range(2):
        with pytest.raises(BatchError, match=said):
            check.check("slots", torch.tensor(slots))
        check.check("slots", torch.tensor([20, 63, 4, 5]))
        check.check("slots", torch.tensor([4]))


def test_lists_of_every_length() -> None:
    check = SlotCheck(PAGE, 1000)
    for count in (0, 1, 900, 3, 996, 500):
        check.check("slots", torch.randperm(996)[:count] + PAGE)
