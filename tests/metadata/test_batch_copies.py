"""A caller's tensors on the host may be written to once a batch is made of them, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from eager_steps import BLOCKS, CONTEXT, PAGE, PAGES, REQUEST_TABLE, Steps, values

from anyattn.core.batch import Exact, ForwardBatch, ForwardMode, UpperBound
from anyattn.core.ids import VirtualIds
from anyattn.core.plan import TableForm

Make = Callable[..., ForwardBatch]
ROWS, PREFIX, NEW = [2, 0, 1], [7, 30, 3], [4, 2, 1]
SEQ = [p + n for p, n in zip(PREFIX, NEW, strict=True)]
ENCODER = [5, 6, 7]


def _decode(rows: Any, prefix: Any, new: Any, loc: Any, **options: Any) -> ForwardBatch:
    return ForwardBatch.decode(rows, prefix, loc, **options)


def _as(mode: ForwardMode) -> Make:
    def make(rows: Any, prefix: Any, new: Any, loc: Any, **options: Any) -> ForwardBatch:
        return ForwardBatch.extend(rows, prefix, new, loc, mode=mode, **options)

    return make


MODES: dict[str, Make] = {
    "decode": _decode,
    "extend": ForwardBatch.extend,
    "mixed": ForwardBatch.mixed,
    "verify": ForwardBatch.verify,
    "draft extend": _as(ForwardMode.DRAFT_EXTEND),
    "split prefill": _as(ForwardMode.SPLIT_PREFILL),
}


class Given:
    """The fields of one step on the host, as their owner has them: int64 tensors."""

    def __init__(self, steps: Steps, mode: str) -> None:
        self.decode = mode == "decode"
        new = [1] * len(NEW) if self.decode else NEW
        table = steps.table.req_to_token
        slots = [
            int(table[r, n - each + i])
            for r, n, each in zip(ROWS, SEQ, new, strict=True)
            for i in range(each)
        ]
        lengths = SEQ if self.decode else PREFIX
        self.tensors = [torch.tensor(x) for x in (ROWS, lengths, new, slots)]
        self.exact = Exact(torch.tensor(SEQ), torch.tensor(new))

    def overwrite(self) -> None:
        for each in (*self.tensors, self.exact.seq_lens, self.exact.extend_lens):
            each.fill_(CONTEXT - 1)


@pytest.mark.parametrize("exact", [False, True], ids=["lengths", "host_lens"])
@pytest.mark.parametrize("form", [REQUEST_TABLE, BLOCKS, PAGES], ids=["rows", "blocks", "pages"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_that_of_when_its_batch_was_made(mode: str, form: TableForm, exact: bool) -> None:
    steps = Steps(form)
    given = Given(steps, mode)
    options = {"host_lens": given.exact} if exact else {}
    untouched = [x.tolist() for x in given.tensors]
    want = steps.compiler.prepare(MODES[mode](*untouched))
    made = MODES[mode](*given.tensors, **options)
    given.overwrite()
    plan = steps.compiler.prepare(made)
    for each in (plan, want):
        steps.compiler.fill(each)
        steps.compiler.check(each)
    found, wanted = values(plan), values(want)
    assert plan.max_kv_len == max(SEQ)
    assert {**found, "key": None} == {**wanted, "key": None}
    assert plan.key[2:] == want.key[2:]


@pytest.mark.parametrize("form", [BLOCKS, PAGES], ids=["blocks", "pages"])
@pytest.mark.parametrize("mode", MODES)
def test_tables_of_a_batch_planned_before_are_as_wide_as_it_needs(mode: str, form: TableForm) -> None:
    """What the first plan found out of the lengths isn't overtaken by a caller's next step."""
    steps = Steps(form)
    given = Given(steps, mode)
    made = MODES[mode](*given.tensors)
    plans = [steps.compiler.prepare(made)]
    given.overwrite()
    plans.append(steps.compiler.prepare(made))
    for each in plans:
        steps.compiler.fill(each)
        steps.compiler.check(each)
    first, again = map(values, plans)
    assert first["seq_lens"] == SEQ
    assert again == first


@pytest.mark.parametrize("mode", MODES)
def test_no_field_is_a_callers_tensor(mode: str) -> None:
    """Whatever a batch holds, none of it lies in memory that was given; looked at by what the fields are, so
    that a new one is looked at, too.
    """
    given = Given(Steps(), mode)
    more = {"positions": torch.arange(len(given.tensors[3]))} if mode != "mixed" else {}
    if mode not in ("mixed", "verify"):
        more["encoder_lens"] = torch.tensor(ENCODER)
    if mode not in ("decode", "mixed", "verify"):
        more["encoder_out_cache_loc"] = torch.arange(sum(ENCODER)) + PAGE
    made = MODES[mode](*given.tensors, host_lens=given.exact, **more)
    given_ends = [_memory(x) for x in (*given.tensors, *more.values(), *vars(given.exact).values())]
    assert isinstance(made.host_lens, Exact)
    held = [getattr(made, f.name) for f in fields(made)] + list(vars(made.host_lens).values())
    found = [x for x in held if isinstance(x, torch.Tensor)]
    assert len(found) >= 6
    assert not {_memory(x) for x in found} & set(given_ends)
    for name, value in more.items():
        assert getattr(made, name).tolist() == value.tolist()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_virtual_slots_are_copied() -> None:
    slots = torch.tensor([9, 10])
    made = ForwardBatch.extend([0], [3], [2], VirtualIds(slots))
    slots.fill_(7)
    assert made.out_cache_loc is not None
    assert made.out_cache_loc.tolist() == [9, 10]


def test_lengths_of_the_host_beside_those_of_a_device_are_copied() -> None:
    on_device, lens = torch.tensor([3, 5], device="meta"), Exact(torch.tensor([4, 6]), torch.tensor([1, 1]))
    rows, loc = torch.tensor([1, 0]), torch.tensor([9, 8])
    assert lens.longest == 6
    made = ForwardBatch.extend(rows, on_device, torch.ones_like(on_device), loc, host_lens=lens)
    for each in (rows, loc, lens.seq_lens, lens.extend_lens):
        each.fill_(CONTEXT)
    assert made.exact is not None
    assert (made.exact.longest, made.exact.extend_lens.tolist()) == (6, [1, 1])
    assert made.out_cache_loc is not None
    assert (made.req_pool_indices.tolist(), made.out_cache_loc.tolist()) == ([1, 0], [9, 8])


def test_what_is_on_a_device_stays_the_callers() -> None:
    on_device = [
        torch.tensor(x, device="meta") for x in (ROWS, PREFIX, NEW, range(sum(NEW)), range(sum(NEW)))
    ]
    made = ForwardBatch.verify(
        *on_device[:4], positions=on_device[4], host_lens=UpperBound(CONTEXT, max(NEW))
    )
    assert made.req_pool_indices is on_device[0]
    assert made.extend_seq_lens is on_device[2]
    assert made.out_cache_loc is on_device[3]
    assert made.positions is on_device[4]


@pytest.mark.parametrize("mode", MODES)
def test_a_replays_vectors_are_looked_at_where_they_lie(mode: str) -> None:
    """What a batch has packed isn't packed once more."""
    steps = Steps()
    made = MODES[mode](*Given(steps, mode).tensors)
    pack = steps.compiler._packed(made)
    assert pack is not None
    assert pack.wide is made.whole
    vectors = (made.req_pool_indices, made.seq_lens, made.extend_seq_lens, made.out_cache_loc)
    assert made.whole.tolist() == [x for v in vectors if v is not None for x in v.tolist()]
