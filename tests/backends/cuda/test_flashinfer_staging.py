"""Pinned memory of FlashInfer's planners: by turns, and never while a copy out of it is under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anyattn.backends.cuda.flashinfer_staging import PIECE, Pieces, Staging


class _Event:
    """Ends when the device does what was given to it before."""

    def __init__(self, device: _Device) -> None:
        self._device, self.mark = device, 0

    def synchronize(self) -> None:
        if self.mark > self._device.done:
            self._device.waits += 1
            self._device.run(self.mark)


class _Device:
    """A stream of copies out of pinned memory, and the recorder of its events."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, bytes]] = []
        self.done = self.waits = 0

    def new_event(self) -> _Event:
        return _Event(self)

    def record(self, event: _Event) -> None:
        event.mark = len(self.copies)

    def run(self, upto: int) -> None:
        """Copies read their source now: it must hold what was planned."""
        for memory, planned in self.copies[self.done : upto]:
            assert bytes(memory[:4].tolist()) == planned, "overwritten before it was copied"
        self.done = max(self.done, upto)


class _Wrapper:
    def __init__(self, device: _Device, size: int = 64) -> None:
        self._device = device
        self._pin_memory_int_workspace_buffer = torch.zeros(size, dtype=torch.uint8)

    def plan(self, number: int, *, fail: bool = False) -> None:
        memory = self._pin_memory_int_workspace_buffer
        memory[:4] = number
        self._device.copies.append((memory, bytes([number] * 4)))
        if fail:
            raise ValueError("refused")


class _Shy(_Wrapper):
    """Of a version that keeps its memory elsewhere."""

    def __init__(self, device: _Device) -> None:
        super().__init__(device)
        self.elsewhere = self._pin_memory_int_workspace_buffer
        del self._pin_memory_int_workspace_buffer

    def plan(self, number: int, *, fail: bool = False) -> None:
        self.elsewhere[:4] = number
        self._device.copies.append((self.elsewhere, bytes([number] * 4)))


def _staging(device: _Device) -> Staging:
    return Staging(device)  # type: ignore[arg-type]


def test_plans_in_flight_have_memory_of_their_own() -> None:
    device = _Device()
    staging, wrappers = _staging(device), [_Wrapper(device) for _ in range(2)]
    for number in range(4):
        staging.plan(wrappers[number % 2], number)
    assert len({memory.data_ptr() for memory, _ in device.copies}) == 4
    assert device.waits == 0
    device.run(4)
    for number in range(4, 8):
        staging.plan(wrappers[0], number)
    assert device.waits == 0, "copied by now"
    assert len({memory.data_ptr() for memory, _ in device.copies}) == 4, "no more memory than that"


@pytest.mark.parametrize("kind", [_Wrapper, _Shy])
def test_memory_that_is_being_read_is_waited_for(kind: Any) -> None:
    device = _Device()
    staging, wrapper = _staging(device), kind(device)
    for number in range(12):
        staging.plan(wrapper, number)
    device.run(12)
    assert device.waits == (8 if kind is _Wrapper else 11)


def test_sizes_are_not_mixed() -> None:
    device = _Device()
    staging, wrappers = _staging(device), [_Wrapper(device, size) for size in (64, 128)]
    for number in range(12):
        staging.plan(wrappers[number % 2], number)
        size = 128 if number % 2 else 64
        assert wrappers[number % 2]._pin_memory_int_workspace_buffer.shape == (size,)
    device.run(12)


def test_a_plan_that_failed_may_have_started_its_copy() -> None:
    device = _Device()
    staging, wrapper = _staging(device), _Wrapper(device)
    with pytest.raises(ValueError, match="refused"):
        staging.plan(wrapper, 1, fail=True)
    for number in range(2, 6):
        staging.plan(wrapper, number)
    device.run(5)
    assert device.waits == 1


def test_no_events_where_copies_end_at_once() -> None:
    device = _Device()
    wrapper = _Wrapper(device)
    own = wrapper._pin_memory_int_workspace_buffer
    Staging(None).plan(wrapper, 3)
    assert wrapper._pin_memory_int_workspace_buffer is own


class _Streams(_Device):
    """Copies of several streams; what is recorded on one stands behind that stream's copies alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stream: int | None = 1
        self.captured: set[int] = set()
        self.owners: list[int | None] = []
        self.marked: list[tuple[int, int]] = []

    def shared(self) -> int | None:
        return self.stream

    def record_on(self, handle: int, event: _Event) -> bool:
        if handle in self.captured:
            return False
        event.mark = len(self.copies)
        self.marked.append((handle, event.mark))
        return True

    def copy(self, pieces: Pieces, number: int) -> torch.Tensor:
        memory = pieces.take()
        assert memory is not None
        assert memory.shape == (PIECE,)
        memory[:4] = number
        self.copies.append((memory, bytes([number] * 4)))
        self.owners.append(self.stream)
        return memory


def _pieces(device: _Streams) -> Pieces:
    return Pieces(device)  # type: ignore[arg-type]


def test_one_event_stands_behind_a_block_of_pieces() -> None:
    device = _Streams()
    pieces = _pieces(device)
    taken = [device.copy(pieces, number) for number in range(32)]
    assert len({memory.data_ptr() for memory in taken}) == 32
    assert (device.waits, len(device.marked)) == (0, 3)
    for number in range(32, 100):  # the device never runs by itself: each block is waited for
        device.copy(pieces, number)
    device.run(100)
    assert device.waits == 9
    assert len({memory.data_ptr() for memory, _ in device.copies}) == 32, "no more memory than that"


def test_pieces_of_a_device_that_keeps_up_are_not_waited_for() -> None:
    device = _Streams()
    pieces = _pieces(device)
    for number in range(100):
        device.copy(pieces, number)
        device.run(number + 1)
    assert device.waits == 0


def test_a_block_holds_copies_of_one_stream() -> None:
    device = _Streams()
    pieces = _pieces(device)
    for number in range(24):
        device.stream = 1 + number // 3 % 2
        device.copy(pieces, number)
    for handle, mark in device.marked:
        assert device.owners[mark - 1] == handle, "marked on the stream that was left"
    assert len(device.marked) == 7
    device.run(24)


def test_a_block_that_could_not_be_marked_is_never_used_again() -> None:
    device = _Streams()
    pieces = _pieces(device)
    lost = {device.copy(pieces, number).data_ptr() for number in range(3)}
    device.captured, device.stream = {1}, 2
    later = {device.copy(pieces, number).data_ptr() for number in range(3, 100)}
    assert not lost & later
    device.run(100)


def test_no_pieces_where_streams_cannot_be_told_apart() -> None:
    device = _Streams()
    device.stream = None
    assert _pieces(device).take() is None
