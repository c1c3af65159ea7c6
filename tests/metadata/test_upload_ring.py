"""Staging buffers: copies on one stream share one, and none is written again before its copies have ended."""

from typing import Any

import pytest
import torch

from anyattn.core.metadata import upload
from anyattn.core.metadata.upload import Uploader, UploadLayout
from anyattn.errors import BatchError

CAPACITY = 1 << 10


class Event:
    def __init__(self) -> None:
        self.marked, self.waited = list[int](), 0

    def synchronize(self) -> None:
        self.waited += 1

    def query(self) -> bool:
        return True


class Streams:
    """Stands for an `EventRecorder` of a device with streams that can be marked later."""

    def __init__(self) -> None:
        self.current: int | None = 7
        self.captured, self.copies = set[int](), dict[int, int]()

    def shared(self) -> int | None:
        return self.current

    def new_event(self) -> Event:
        return Event()

    def record(self, event: Event) -> None:
        event.marked.append(-1)

    def record_on(self, stream: int, event: Event) -> bool:
        if stream in self.captured:
            return False
        event.marked.append(stream)
        return True


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory isn't pinned, and no stream of a real device is asked."""
    plain = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return plain(*args, **options)

    monkeypatch.setattr(upload.torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.fixture
def uploader(unpinned: None) -> Uploader:
    """Of a device that is never touched: regions are on the CPU."""
    return Uploader(torch.device("cuda"), capacity=CAPACITY, events=Streams())  # type: ignore[arg-type]


def sent(uploader: Uploader, value: int, entries: int = 16) -> torch.Tensor:
    region = torch.zeros(8 * entries, dtype=torch.uint8)
    uploader.send(region, [(0, torch.full((entries,), value), torch.int64)])
    return region.view(torch.int64)


def events(uploader: Uploader) -> list[Event]:
    return [each.copied for each in uploader._ring if each is not None]


def test_copies_share_a_buffer_and_one_event(uploader: Uploader) -> None:
    a_buffer = CAPACITY // 128
    for value in range(a_buffer):
        assert sent(uploader, value).tolist() == [value] * 16
    (event,) = events(uploader)
    assert event.marked == []
    sent(uploader, -1)
    assert event.marked == [7]
    assert event.waited == 0
    for value in range(4 * a_buffer):
        sent(uploader, value)
    assert event.marked == [7, 7]
    assert event.waited == 1, "waited for before the buffer was filled again"
    assert [len(each.marked) for each in events(uploader)] == [1, 2, 1, 1]


def test_buffers_are_not_overwritten_within_a_ring(uploader: Uploader) -> None:
    sent(uploader, 5)
    first = next(each for each in uploader._ring if each is not None)
    before = first.memory[:128].clone()
    for value in range(3 * CAPACITY // 128 + CAPACITY // 128 - 1):
        sent(uploader, value + 100)
        assert torch.equal(first.memory[:128], before)
    sent(uploader, 6)
    assert not torch.equal(first.memory[:128], before)


def test_another_stream_has_buffers_of_its_own(uploader: Uploader) -> None:
    streams: Any = uploader._events
    for turn in range(6):
        streams.current = 7 + turn % 2
        assert sent(uploader, turn).tolist() == [turn] * 16
    marks = [stream for each in events(uploader) for stream in each.marked]
    assert sorted(marks) == [7, 7, 7, 8, 8], "each by the stream of its copy, when the other one came"


def test_a_buffer_of_a_stream_in_capture_is_left_alone(uploader: Uploader) -> None:
    streams: Any = uploader._events
    sent(uploader, 1)
    kept = next(each for each in uploader._ring if each is not None)
    before = kept.memory.clone()
    streams.captured.add(7)
    streams.current = 8
    for value in range(6 * CAPACITY // 128):
        sent(uploader, value)
    assert uploader._unmarked == [kept]
    assert all(each is not kept for each in uploader._ring)
    assert torch.equal(kept.memory, before)


def test_large_copies_get_room(uploader: Uploader) -> None:
    assert sent(uploader, 3, entries=CAPACITY).tolist() == [3] * CAPACITY
    assert sent(uploader, 4).tolist() == [4] * 16


def test_without_streams_each_copy_is_marked(uploader: Uploader) -> None:
    streams: Any = uploader._events
    streams.current = None
    for value in range(6):
        assert sent(uploader, value).tolist() == [value] * 16
    assert sum(len(each.marked) for each in events(uploader)) == 6
    assert len(events(uploader)) == 4


def layout(region: torch.Tensor) -> UploadLayout:
    fields = [("a", 0, 3, torch.int64), ("b", 32, 5, torch.int32), ("c", 64, 4, torch.int64)]
    return UploadLayout(region, fields)


def vectors() -> tuple[torch.Tensor, ...]:
    return torch.arange(3), torch.arange(5) + 10, torch.arange(4) + 20


def test_vectors_are_packed_for_a_pull(uploader: Uploader) -> None:
    heard = []

    def pull(asked: UploadLayout, memory: torch.Tensor, address: int, stream: int) -> bool:
        offset = address - memory.data_ptr()
        wide = memory[offset : offset + asked.wide_bytes].view(torch.int64)
        heard.append((offset % 16, stream, wide[:3].tolist(), wide[3:8].tolist(), wide[8:12].tolist()))
        return True

    uploader.pull = pull
    region = torch.zeros(96, dtype=torch.uint8)
    for _ in range(2):
        uploader.send_again(layout(region), vectors())
    assert heard == [(0, 7, [0, 1, 2], [10, 11, 12, 13, 14], [20, 21, 22, 23])] * 2
    assert not region.any(), "nothing was copied besides"


@pytest.mark.parametrize("how", ["pulled", "refused", "no stream", "no kernel"])
def test_vectors_that_lie_side_by_side_already(how: str, uploader: Uploader) -> None:
    heard = []

    def pull(asked: UploadLayout, memory: torch.Tensor, address: int, stream: int) -> bool:
        offset = address - memory.data_ptr()
        heard.append(memory[offset : offset + asked.wide_bytes].view(torch.int64).tolist())
        return how == "pulled"

    uploader.pull = None if how == "no kernel" else pull
    if how == "no stream":
        uploader._events.current = None  # type: ignore[attr-defined]
    region, given = torch.zeros(96, dtype=torch.uint8), vectors()
    whole = torch.cat(given)
    for _ in range(3):
        uploader.send_again(layout(region), given, whole.numpy())
    assert heard == ([whole.tolist()] * 3 if how in ("pulled", "refused") else [])
    copied = region[:24].view(torch.int64).tolist() + region[32:52].view(torch.int32).tolist()
    assert copied == ([0] * 8 if how == "pulled" else whole[:8].tolist())


@pytest.mark.parametrize("odd", ["no stream", "refused", "int32", "strided"])
def test_what_cannot_be_pulled_is_copied(odd: str, uploader: Uploader) -> None:
    given = list(vectors())
    uploader.pull = lambda *asked: odd not in ("refused",)
    if odd == "no stream":
        uploader._events.current = None  # type: ignore[attr-defined]
    elif odd == "int32":
        given[0] = given[0].int()
    elif odd == "strided":
        given[1] = torch.stack([given[1], given[1]], 1)[:, 0]
    region = torch.zeros(96, dtype=torch.uint8)
    uploader.send_again(layout(region), tuple(given))
    assert region[:24].view(torch.int64).tolist() == [0, 1, 2]
    assert region[32:52].view(torch.int32).tolist() == [10, 11, 12, 13, 14]
    assert region[64:].view(torch.int64).tolist() == [20, 21, 22, 23]


def test_vectors_of_another_length_are_refused(uploader: Uploader) -> None:
    uploader.pull = lambda *asked: True
    a, b, c = vectors()
    with pytest.raises(BatchError, match="isn't as long"):
        uploader.send_again(layout(torch.zeros(96, dtype=torch.uint8)), (a, torch.arange(7), c))
    assert b.shape == (5,)


@pytest.mark.parametrize("first", [True, False])
def test_a_buffer_is_written_to_inside_of_inference_mode_and_outside(uploader: Uploader, first: bool) -> None:
    for step in range(3):
        with torch.inference_mode(first is (step % 2 == 0)):
            assert sent(uploader, step).tolist() == [step] * 16
        staging = uploader._ring[uploader._next]
        assert staging is not None
        staging.used = 0  # the same view again
