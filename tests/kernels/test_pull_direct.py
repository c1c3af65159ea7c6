"""Pulled uploads, launched directly on stand-ins: the arguments are the layout's, the source the ring's."""

import pytest
import torch

pytest.importorskip("triton", reason="the portable extra isn't installed")

from direct_cases import STREAM, Kernel, stand_ins

from anyattn.core.metadata.upload import UploadLayout
from anyattn.kernels.triton import launch, pull_launch
from anyattn.kernels.triton.pull_launch import Puller


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    stand_ins(monkeypatch)
    made = Kernel()
    monkeypatch.setattr(pull_launch, "pull_kernel", made)
    return made


def layout(parts: int = 3) -> UploadLayout:
    fields = [(f"v{i}", 64 * i, 5, (torch.int64, torch.int32)[i % 2]) for i in range(parts)]
    return UploadLayout(torch.zeros(64 * parts, dtype=torch.uint8), fields)


def test_one_kernel_serves_every_layout_of_its_kind(kernel: Kernel) -> None:
    pull, memory, first = Puller(), torch.zeros(512, dtype=torch.uint8), layout()
    assert pull(first, memory, memory.data_ptr(), STREAM)
    second = layout()
    assert pull(second, memory, memory.data_ptr() + 256, STREAM)
    assert len(kernel.launches) == 1
    begun = kernel.compiled.calls
    assert [call[3] for call in begun] == [STREAM, STREAM]
    assert [call[:3] for call in begun] == [(1, 3, 1)] * 2
    at = begun[0].index(memory.data_ptr())
    assert begun[1][at : at + 2] == (memory.data_ptr() + 256, second.region.data_ptr())
    assert begun[1][at + 2 : at + 12] == (5, 5, 5, 0, 0, 0, 64, 128, 0, 0)
    assert begun[1][at + 12 : at + 14] == (0b10, 256)


def test_what_is_not_launched_directly_is_left_to_a_copy(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = torch.zeros(512, dtype=torch.uint8)
    assert not Puller()(layout(parts=6), memory, memory.data_ptr(), STREAM)
    monkeypatch.setattr(launch, "_direct", False)
    assert not Puller()(layout(), memory, memory.data_ptr(), STREAM)
    assert kernel.launches == []


def test_memory_that_devices_cannot_read_is_copied(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

    monkeypatch.setattr(pull_launch, "first_launch", refuse)
    pull, asked = Puller(), layout()
    for _ in range(2):
        assert not pull(asked, torch.zeros(512, dtype=torch.uint8), 0, STREAM)
