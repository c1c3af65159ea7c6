"""Faults of packs, each noticed by a test of theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_pack as promises
from eager_steps import Steps

from anyattn.testing.mutants.patching import Mutant, applied

_PACK = "anyattn.core.metadata.pack"


def wrong(name: str) -> Callable[[Steps], None]:
    return lambda steps: promises.test_what_is_wrong_is_refused_with_the_reason(name, steps)


FAULTS: dict[str, tuple[str, str, str, Callable[[Steps], None]]] = {
    "the bound of rows": (f"{_PACK}:Packs._new", "self._rows - 1", "self._rows", wrong("row")),
    "the bound of lengths": (
        f"{_PACK}:Packs._new", "(requests, self._context)", "(0, self._context)", wrong("length"),
    ),
    "the end of the pool": (
        f"{_PACK}:Packs._new", "self._total - 1", "self._total", wrong("beyond the pool"),
    ),
    "slots that are named twice": (
        f"{_PACK}:Pack.right", "self._noted(wide[self._slots])", "True", wrong("twice"),
    ),
    "lengths given apart": (
        f"{_PACK}:Packs.taken", "exact.seq_lens is not batch.seq_lens", "False",
        promises.test_lengths_that_the_batch_has_twice_are_checked_apart,
    ),
    "another batch's own memory": (
        f"{_PACK}:Pack.take", "self.wide, self.views = self._own", "pass",
        promises.test_a_pack_serves_batches_that_lie_either_way,
    ),
    "another field of a batch": (
        "anyattn.core.batch:ForwardBatch.view", 'made.__dict__["whole"] = None', "pass",
        lambda steps: promises.test_a_batch_with_another_field_lies_elsewhere("out_cache_loc", steps),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_pack_that_overlooks(name: str) -> None:
    where, old, new, promise = FAULTS[name]

    def steps() -> Steps:
        made = Steps()
        made.compiler.checks = "host"
        return made

    promise(steps())
    with applied(Mutant(name=name, where=where, old=old, new=new, names=())):
        broken = steps()
        with pytest.raises((AssertionError, IndexError, RuntimeError)):
            promise(broken)
