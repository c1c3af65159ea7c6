"""Staging buffers of an uploader that is gone: held until the device has read them, then given back."""

import gc
import weakref
from collections import deque
from typing import Any

import pytest
import torch
from test_upload_ring import CAPACITY, Event, Streams, sent, unpinned

from anyattn.core.capturing import marked_as_capturing
from anyattn.core.metadata import staying
from anyattn.core.metadata.upload import Uploader

__all__ = ["unpinned"]


class Device(Streams):
    """Events that are done when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def new_event(self) -> Event:
        self.made.append(event := Asked())
        return event


class Asked(Event):
    done = False

    def query(self) -> bool:
        assert self.marked, "an event that nobody has marked says that it is done"
        return self.done


@pytest.fixture(autouse=True)
def held(unpinned: None, monkeypatch: pytest.MonkeyPatch) -> deque[Any]:
    mine: deque[Any] = deque()
    monkeypatch.setattr(staying, "_staying", mine)
    return mine


def gone(device: Device, sends: int = 1) -> list[weakref.ref[torch.Tensor]]:
    """The buffers of an uploader that has sent something and is there no more."""
    made = Uploader(torch.device("cuda"), capacity=CAPACITY, events=device)  # type: ignore[arg-type]
    for value in range(sends):
        sent(made, value)
    memory = [weakref.ref(each.memory) for each in made._ring if each is not None]
    del made
    gc.collect()
    return memory


def another(device: Device) -> Uploader:
    """The next one to allocate."""
    made = Uploader(torch.device("cuda"), capacity=CAPACITY, events=device)  # type: ignore[arg-type]
    sent(made, 0)
    return made


def test_a_buffer_stays_until_the_device_has_read_it() -> None:
    device = Device()
    (memory,) = gone(device)
    (event,) = device.made
    assert event.marked == [7], "behind all that its stream was given"
    keep = another(Device())
    assert memory() is not None
    event.done = True
    keep = another(Device())
    assert memory() is None
    assert keep is not None


def test_every_buffer_of_the_ring_stays(held: deque[Any]) -> None:
    device = Device()
    memory = gone(device, sends=3 * CAPACITY // 128)
    assert len(memory) == 3
    assert all(each() is not None for each in memory)
    device.made[0].done = device.made[2].done = True
    staying.sweep()
    assert [each() is None for each in memory].count(True) == 2
    assert len(held) == 1


def test_a_stream_in_capture_is_marked_later() -> None:
    device = Device()
    device.captured.add(7)
    (memory,) = gone(device)
    (event,) = device.made
    staying.sweep()
    assert event.marked == []
    assert memory() is not None
    device.captured.clear()
    staying.sweep()
    assert event.marked == [7]
    event.done = True
    staying.sweep()
    assert memory() is None


def test_no_event_is_asked_in_a_capture(held: deque[Any]) -> None:
    device = Device()
    (memory,) = gone(device)
    device.made[0].done = True
    with marked_as_capturing():
        keep = another(Device())
    assert memory() is not None
    assert keep is not None
    staying.sweep()
    assert not held


def test_a_copy_by_torch_alone_is_marked_already(held: deque[Any]) -> None:
    device = Device()
    device.current = None
    gone(device)
    (event,) = device.made
    assert event.marked == [-1]
    assert [mark for _, _, mark in held] == [None]
