"""Steps in the place of ones like them: the same as prepared from nothing, and only where that is sure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from eager_steps import CONTEXT, PAGE, REQUESTS, Steps, same, values

from anyattn.core.batch import Exact, ForwardBatch, UpperBound
from anyattn.core.forward_mode import ForwardMode
from anyattn.core.ids import IdKind
from anyattn.core.metadata import again as module
from anyattn.core.metadata.again import again_for
from anyattn.core.plan import Plan
from anyattn.core.strategy import Strategy
from anyattn.errors import BatchError
from anyattn.testing.mutants.patching import Mutant, applied

ROWS, LENS, LOC = [3, 1], [5, 9], [9, 8]


@pytest.fixture
def steps() -> Steps:
    return made_steps()


def made_steps() -> Steps:
    made = Steps()
    made.compiler.checks = "host"
    return made


def known(steps: Steps, batch: ForwardBatch | None = None) -> Plan:
    """A plan that later batches like its own may take."""
    plan = steps.plan(ForwardBatch.decode(ROWS, LENS, LOC) if batch is None else batch)
    steps.compiler.renew(plan, plan.batch)
    assert plan.again
    return plan


def refreshed(plan: Plan, batch: ForwardBatch) -> bool:
    again = plan.again.get(batch.num_padding_requests)
    return again is not None and again(plan, batch)


def taken(steps: Steps, plan: Plan, batch: ForwardBatch) -> bool:
    done = refreshed(plan, batch)
    if done:
        steps.compiler.fill(plan)
        plan.max_kv_len = 0 if not isinstance(batch.host_lens, Exact) else batch.host_lens.longest
        same(plan, batch, steps)
    return done


def test_a_batch_like_it_is_taken(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = known(steps)
    monkeypatch.setattr(steps.compiler, "_packed", None)
    for rows, lens, loc in (
        ([0, 7], [1, CONTEXT], [PAGE, 40]),
        ([7, 0], [2, 2], [41, 42]),
        (ROWS, LENS, LOC),
    ):
        assert taken(steps, plan, ForwardBatch.decode(rows, lens, loc))


def test_positions_and_padding_are_taken(steps: Steps) -> None:
    plan = known(steps, ForwardBatch.decode(ROWS, LENS, LOC, positions=[4, 8]))
    assert taken(steps, plan, ForwardBatch.decode(ROWS, [6, 10], [11, 12], positions=[5, 9]))
    padded = known(steps, ForwardBatch.decode([3, REQUESTS], [5, 1], [9, 0], num_padding_requests=1))
    assert taken(steps, padded, ForwardBatch.decode([2, REQUESTS], [7, 1], [8, 0], num_padding_requests=1))


WRONG = {
    "row": ([0, REQUESTS], [3, 4], [9, 8]),
    "negative row": ([-1, 0], [3, 4], [9, 8]),
    "length": ([0, 1], [CONTEXT + 1, 4], [9, 8]),
    "sink": ([0, 1], [3, 4], [9, PAGE - 1]),
    "negative slot": ([0, 1], [3, 4], [9, -9]),
    "beyond the pool": ([0, 1], [3, 4], [PAGE + REQUESTS * CONTEXT, 9]),
    "twice": ([0, 1], [3, 4], [9, 9]),
}


def refuse(name: str, steps: Steps) -> None:
    """What is wrong is left to those who say why, and nothing of it stays."""
    plan = known(steps)
    before = values(plan)
    wrong = ForwardBatch.decode(*WRONG[name])
    for _ in range(2):
        assert not refreshed(plan, wrong)
        assert values(plan) == before
        with pytest.raises(BatchError):
            steps.compiler.renew(plan, wrong)
    assert taken(steps, plan, ForwardBatch.decode(ROWS, LENS, LOC))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_left_alone(name: str, steps: Steps) -> None:
    refuse(name, steps)


def plain(**options: Any) -> ForwardBatch:
    return ForwardBatch.decode(ROWS, [6, 10], [11, 12], **options)


OTHER: dict[str, Callable[[], ForwardBatch]] = {
    "three requests": lambda: ForwardBatch.decode([3, 1, 0], [6, 10, 2], [11, 12, 13]),
    "too many requests": lambda: ForwardBatch.decode([3, 1, 0], [6, 10, 2], [11, 12, 13]).view(num_tokens=2),
    "an extend": lambda: ForwardBatch.extend(ROWS, [5, 9], [1, 1], [11, 12]),
    "positions": lambda: plain(positions=[5, 9]),
    "another number of tokens": lambda: plain().view(num_tokens=1),
    "padding": lambda: ForwardBatch.decode([3, REQUESTS], [6, 1], [11, 0], num_padding_requests=1),
    "one padded": lambda: plain().view(num_padding_requests=1),
    "padded tokens": lambda: plain().view(num_padding_tokens=1),
    "lengths apart": lambda: plain().view(host_lens=Exact(torch.tensor([6, 11]), torch.tensor([1, 1]))),
    "bounds": lambda: plain(host_lens=UpperBound(CONTEXT)),
    "lengths unknown": lambda: plain().view(host_lens=None),
    "a mask": lambda: plain().view(mask=object()),
    "encoders": lambda: plain(encoder_lens=[2, 3]),
    "slots of an encoder": lambda: plain().view(encoder_out_cache_loc=torch.tensor([7])),
    "virtual ids": lambda: plain().view(ids=IdKind.VIRTUAL),
    "a field of its own": lambda: plain().view(seq_lens=torch.tensor([6, 10])),
}


def leave(name: str, steps: Steps) -> None:
    """A batch of another kind isn't taken."""
    plan = known(steps)
    again = plan.again[0]
    before = values(plan)
    assert not again(plan, OTHER[name]())
    assert values(plan) == before


@pytest.mark.parametrize("name", OTHER)
def test_another_kind_is_left_alone(name: str, steps: Steps) -> None:
    leave(name, steps)


def test_each_padding_is_known_apart(steps: Steps) -> None:
    plan = known(steps)
    padded = ForwardBatch.decode([3, REQUESTS], [6, 1], [11, 0], num_padding_requests=1)
    assert not refreshed(plan, padded)
    steps.compiler.renew(plan, padded)
    assert sorted(plan.again) == [0, 1]
    assert taken(steps, plan, padded)
    assert taken(steps, plan, plain())


def test_without_checks_nothing_is_looked_at(steps: Steps) -> None:
    steps.compiler.checks = "off"
    plan = known(steps)
    assert refreshed(plan, ForwardBatch.decode([0, 1], [3, 4], [9, 9]))


def test_what_is_no_plain_decode_is_never_known(steps: Steps) -> None:
    plan, batch = known(steps), plain()
    pack = steps.compiler._packed(batch)
    assert pack is not None

    def made(**change: Any) -> object:
        other = replace(plan, **{"uploaded": plan.uploaded, **change})
        return again_for(other, pack, steps.compiler.uploader, check=True)

    assert made() is not None
    assert made(batch=batch.view(seq_lens=batch.seq_lens.clone())) is None
    assert made(batch=batch.view(forward_mode=ForwardMode.EXTEND)) is None
    assert made(uploaded=None) is None
    assert made(strategy=Strategy.RAGGED_MERGE) is None


FAULTS: dict[str, tuple[str, str, Callable[[Steps], None]]] = {
    "the number of vectors": ("or len(wide) != size", "or False", lambda s: leave("too many requests", s)),
    "tokens": (
        "or batch.num_tokens != tokens", "or False", lambda s: leave("another number of tokens", s),
    ),
    "the mode": (
        "or batch.forward_mode is not ForwardMode.DECODE", "or False", lambda s: leave("an extend", s),
    ),
    "requests": ("or batch.num_padding_requests != padded", "or False", lambda s: leave("one padded", s)),
    "padded tokens": (
        "or batch.num_padding_tokens != padded_tokens", "or False", lambda s: leave("padded tokens", s),
    ),
    "ids": ("or batch.ids is not ids", "or False", lambda s: leave("virtual ids", s)),
    "masks": ("or batch.mask is not None", "or False", lambda s: leave("a mask", s)),
    "encoders": ("or batch.encoder_lens is not None", "or False", lambda s: leave("encoders", s)),
    "slots of an encoder": (
        "or batch.encoder_out_cache_loc is not None", "or False", lambda s: leave("slots of an encoder", s),
    ),
    "what the host knows": ("or type(lens) is not kind", "or False", lambda s: leave("bounds", s)),
    "lengths apart": (
        "lens.seq_lens is not batch.seq_lens", "False", lambda s: leave("lengths apart", s),
    ),
    "the values": ("not right(wide)", "False", lambda s: refuse("twice", s)),
    "the upload": (
        "uploader.send_again(layout, layout.read(batch))", "pass",
        lambda s: test_positions_and_padding_are_taken(s),
    ),
    "whom it stands for": ("plan.retarget(batch)", "pass", lambda s: test_positions_and_padding_are_taken(s)),
    "mirrors of the host": (
        "table.remirror(partial(mirrored, batch, group, table.form.kernel_page) if exact else None)", "pass",
        lambda s: test_positions_and_padding_are_taken(s),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_one_that_overlooks(name: str) -> None:
    old, new, promise = FAULTS[name]
    promise(made_steps())
    where = f"{module.__name__}:again_for"
    with applied(Mutant(name=name, where=where, old=old, new=new, names=())):
        broken = made_steps()
        with pytest.raises((AssertionError, AttributeError, ValueError)):
            promise(broken)
