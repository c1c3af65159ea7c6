"""Which vectors of a batch a step uploads, and where they go."""

from __future__ import annotations

import torch

from anyattn.core.batch import ForwardBatch
from anyattn.core.metadata.buffers import Field, StepStorage
from anyattn.core.metadata.upload import Uploader, UploadLayout

__all__ = ["gathered", "layout_for", "vectors_of"]

_UPLOADED = (
    ("req_pool_indices", "req_pool_indices", torch.int64),
    ("seq_lens", "seq_lens", torch.int32),
    ("extend_lens", "extend_seq_lens", torch.int32),
    ("encoder_lens", "encoder_lens", torch.int32),
    ("out_cache_loc", "out_cache_loc", torch.int64),
    ("positions", "positions", torch.int64),
    ("encoder_out_cache_loc", "encoder_out_cache_loc", torch.int64),
)
"""`(name in storage, field of the batch, dtype)`."""

_ATTRIBUTES = {name: attribute for name, attribute, _ in _UPLOADED}


def vectors_of(batch: ForwardBatch) -> tuple[list[Field], list[torch.Tensor]]:
    """What a step uploads, and where it goes, by name."""
    fields: list[Field] = []
    values: list[torch.Tensor] = []
    for name, attribute, dtype in _UPLOADED:
        value: torch.Tensor | None = getattr(batch, attribute)
        if value is not None:
            fields.append((name, value.shape[0], dtype))
            values.append(value)
    return fields, values


def layout_for(
    region: torch.Tensor, fields: list[Field], vectors: list[tuple[int, torch.Tensor]]
) -> UploadLayout:
    """Of later uploads to `region`: `vectors` are offsets in it, and views."""
    places = zip(fields, vectors, strict=True)
    return UploadLayout(region, [(_ATTRIBUTES[name], at, n, dtype) for (name, n, dtype), (at, _) in places])


def gathered(
    uploader: Uploader, fields: list[Field], values: list[torch.Tensor], on_host: list[bool],
    storage: StepStorage,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Some vectors live on the device: they are copied there, behind the copy of the others."""
    hosts = [i for i, host in enumerate(on_host) if host]
    placed: dict[str, torch.Tensor] = {}
    if hosts:
        region, vectors = storage.packed([fields[i] for i in hosts])
        uploader.send(
            region, [(at, values[i], fields[i][2]) for i, (at, _) in zip(hosts, vectors, strict=True)]
        )
        placed = {fields[i][0]: view for i, (_, view) in zip(hosts, vectors, strict=True)}
    for (name, length, dtype), value in zip(fields, values, strict=True):
        if name not in placed:
            placed[name] = storage.take(name, (length,), dtype)
            placed[name].copy_(value)
    return placed
