"""Vectors that the device reads from where the host packed them: the same bytes as a copy stores."""

from __future__ import annotations

import pytest
import torch

from anyattn.core.metadata.upload import Uploader, UploadLayout
from anyattn.kernels.triton.pull import pull_kernel
from anyattn.kernels.triton.pull_launch import MOST_PARTS

FILLER = 0x5A


def pulled(layout: UploadLayout, wide: torch.Tensor, block: int) -> None:
    """As `Puller` launches it."""
    places, rest = layout.places, MOST_PARTS - len(layout.places)
    lengths, to = [p.length for p in places] + [0] * rest, [p.at for p in places] + [0] * rest
    narrow = sum((p.dtype is torch.int32) << i for i, p in enumerate(places))
    grid = (max(1, -(-max(lengths) // block)), len(places))
    pull_kernel[grid](wide, layout.region, *lengths, *to, NARROW=narrow, BLOCK=block)


@pytest.mark.parametrize("lengths", [(1,), (3, 3, 3), (7, 7, 7, 7), (4, 1, 33, 2, 9), (0, 5)])
@pytest.mark.parametrize("block", [4, 64])
def test_the_same_bytes_as_a_copy(lengths: tuple[int, ...], block: int) -> None:
    dtypes = [torch.int64, torch.int32, torch.int32, torch.int64, torch.int64]
    fields, at = [], 0
    for i, (length, dtype) in enumerate(zip(lengths, dtypes, strict=False)):
        fields.append((f"v{i}", at, length, dtype))
        at += -(-length * dtype.itemsize // 16) * 16
    regions = [torch.full((max(16, at),), FILLER, dtype=torch.uint8) for _ in range(2)]
    vectors = tuple(torch.randint(0, 1 << 30, (length,)) for length in lengths)
    layout = UploadLayout(regions[0], fields)
    wide = torch.full((layout.wide_bytes // 8,), -1)
    for vector, (first, _) in zip(vectors, layout.wide, strict=True):
        wide[first // 8 : first // 8 + vector.shape[0]] = vector
    pulled(layout, wide.view(torch.uint8), block)
    Uploader(torch.device("cpu")).send_again(UploadLayout(regions[1], fields), vectors)
    assert torch.equal(*regions), "and nothing between the vectors is written"
