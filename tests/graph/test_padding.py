"""Batches grown to their bucket: the same whether their vectors lie side by side or not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from anyattn.core.batch import Exact, ForwardBatch, ForwardMode, UpperBound
from anyattn.core.graph.admission import example_batch
from anyattn.core.graph.buckets import GraphKey
from anyattn.core.graph.padding import Padder
from anyattn.core.kv.request_table import RequestTable
from anyattn.testing.mutants.patching import Mutant, applied

BUCKET, FILL = 6, 3
SIZES = (2, 5, 1, 1, 4, 6, 3)
"""Requests of steps that follow each other: growing, shrinking, full."""
FIELDS = ("req_pool_indices", "seq_lens", "extend_seq_lens", "out_cache_loc", "positions")


def padder() -> Padder:
    return Padder(GraphKey(ForwardMode.DECODE, BUCKET, 1), RequestTable(max_requests=8, max_context=32), FILL)


def batch(count: int, step: int, **options: Any) -> ForwardBatch:
    rows, lens = [(step + i) % 8 for i in range(count)], [5 + step + i for i in range(count)]
    return ForwardBatch.decode(rows, lens, [40 + 8 * step + i for i in range(count)], **options)


def apart(given: ForwardBatch) -> ForwardBatch:
    """The same in vectors of their own."""
    own = {name: getattr(given, name).clone() for name in FIELDS if getattr(given, name) is not None}
    lens = given.host_lens
    if isinstance(lens, Exact) and lens.seq_lens is given.seq_lens:
        own["host_lens"] = Exact(own["seq_lens"], own["extend_seq_lens"])
    made = given.view(**own)
    assert made.whole is None
    return made


def told(made: ForwardBatch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(made):
        if field.name not in ("serial", "whole"):
            value = getattr(made, field.name)
            if isinstance(value, Exact):
                value = (value.seq_lens.tolist(), value.extend_lens.tolist(), value.longest, value.total)
            found[field.name] = value.tolist() if isinstance(value, torch.Tensor) else value
    return found


def compare(**options: Any) -> None:
    together, one_by_one = padder(), padder()
    for step, count in enumerate(SIZES):
        if "positions" in options:
            options["positions"] = [9 + step + i for i in range(count)]
        given = batch(count, step, **options)
        assert given.whole is not None
        made, plain = together.pad(given, None), one_by_one.pad(apart(given), None)  # type: ignore[arg-type]
        assert told(made) == told(plain)
        assert made.batch_size == BUCKET
        if count < BUCKET:
            vectors = [getattr(made, name) for name in FIELDS if getattr(made, name) is not None]
            assert made.whole.tolist() == torch.cat(vectors).tolist(), "what is sent is what is said"
            assert made.req_pool_indices.tolist()[count:] == [8] * (BUCKET - count)
            assert made.seq_lens.tolist()[count:] == [FILL] * (BUCKET - count)


@pytest.mark.parametrize(
    "options",
    [{}, {"positions": []}, {"host_lens": UpperBound(32)}],
    ids=["plain", "positions", "bounds"],
)
def test_side_by_side_or_not(options: dict[str, Any]) -> None:
    compare(**options)


def test_lengths_that_the_host_has_apart() -> None:
    given = batch(2, 0)
    other = given.view(host_lens=Exact(given.seq_lens.clone(), given.extend_seq_lens.clone()))
    made = padder().pad(other, None)  # type: ignore[arg-type]
    assert made.whole is not None
    assert isinstance(made.host_lens, Exact)
    assert made.host_lens.seq_lens.tolist() == [5, 6, FILL, FILL, FILL, FILL]
    assert made.host_lens.seq_lens is not made.seq_lens


def test_padding_that_a_batch_has_stays() -> None:
    given = ForwardBatch.decode([1, 8], [5, 1], [40, 0], num_padding_requests=1)
    made = padder().pad(given, None)  # type: ignore[arg-type]
    assert (made.num_padding_requests, made.num_padding_tokens) == (5, 5)
    assert made.seq_lens.tolist() == [5, 1, FILL, FILL, FILL, FILL]


@pytest.mark.parametrize(
    ("where", "old", "new"),
    [
        ("_Whole.fill", "rows[:, requests : self.used] = self.fills", "pass"),
        ("_Whole.fill", "self.used = requests", "pass"),
        (
            "_Whole.fill",
            "rows[:, :requests] = wide.reshape(-1, requests)",
            "rows[:1, :requests] = wide[:requests]",
        ),
        ("Padder._grown", "views[1].fill_(fill)", "pass"),
    ],
    ids=["padding not reset", "what is used not told", "one field alone", "vectors apart not reset"],
)
def test_padding_that_overlooks(where: str, old: str, new: str) -> None:
    where = f"anyattn.core.graph.padding:{where}"
    mutant = Mutant(name="padding", where=where, old=old, new=new, names=())
    with applied(mutant), pytest.raises(AssertionError):
        compare()


@pytest.mark.parametrize(
    "scope", [lambda: torch.device("meta"), torch.inference_mode], ids=["device", "mode"]
)
def test_vectors_are_the_hosts_wherever_a_graph_is_captured(scope: Any) -> None:
    """Where another device is the default, and in inference mode, whose tensors nobody writes to outside."""
    with scope():
        made = padder()
        empty = made.empty(example_batch(made.key, None))
    assert empty.seq_lens.is_cpu
    assert empty.seq_lens.tolist() == [FILL] * BUCKET
    assert empty.exact is not None
    assert empty.exact.longest == FILL
    for given in (batch(2, 0), apart(batch(3, 1))):
        assert told(made.pad(given, None)) == told(padder().pad(given, None))  # type: ignore[arg-type]
