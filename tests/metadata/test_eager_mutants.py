"""Faults in the reuse of eager plans: each is noticed by a test that names its promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import test_eager_plans as promises
from eager_steps import BLOCKS, Steps

from anyattn.testing.mutants.patching import Mutant, applied

_EAGER = "anyattn.core.metadata.eager"
_COMPILER = "anyattn.core.metadata.compiler:MetadataCompiler"


def held(name: str) -> Callable[[Steps], None]:
    return lambda steps: promises.test_what_someone_holds_is_not_written_to(name, steps)


def other(**change: object) -> Callable[[Steps], None]:
    return lambda steps: promises.test_other_shapes_and_fields(change, steps)


def blocks(test: Callable[[], None]) -> Callable[[Steps], None]:
    return lambda steps: test()


def unread(test: Callable[[Steps], None]) -> Callable[[Steps], None]:
    """Without the checks that read what the device has: they would notice it first."""

    def promise(steps: Steps) -> None:
        steps.compiler.checks = "host"
        test(steps)

    return promise


FAULTS: dict[str, tuple[str, str, str, Callable[[Steps], None]]] = {
    "a plan that the caller holds": (
        f"{_EAGER}:_Kept.is_held", "sys.getrefcount(self.plan) != _ALONE", "False",
        promises.test_a_loop_that_holds_its_last_plan_uses_two,
    ),
    "parts that someone holds": (
        f"{_EAGER}:_Kept._counted", "list(map(sys.getrefcount, self._parts))", "[]", held("positions"),
    ),
    "the table that someone holds": (
        f"{_EAGER}:_Kept.__init__", "*plan.tables.values(), ", "", held("table"),
    ),
    "views that someone holds": (
        f"{_EAGER}:_Kept._counted", "list(map(torch._C._storage_Use_Count, self._storages))", "[]",
        held("view"),
    ),
    "positions that a batch brings": (
        f"{_COMPILER}.fit", "loc is None, positions is None, room", "loc is None, room",
        other(positions=[4, 8]),
    ),
    "the width of block tables": (
        f"{_COMPILER}.fit", "if form.kind is TableKind.BLOCK_TABLE:", "if False:",
        blocks(promises.test_wider_block_tables_are_made_anew),
    ),
    "the bound of the lengths": (
        f"{_COMPILER}.renew", "plan.max_kv_len = ", "_ = ",
        unread(promises.test_steps_of_one_shape_share_a_plan),
    ),
    "the values of a later batch": (
        f"{_COMPILER}._send", "self.uploader.send_again(layout, pack.views, pack.wide)", "pass",
        unread(promises.test_steps_of_one_shape_share_a_plan),
    ),
    "what the backend says": (
        f"{_EAGER}:EagerPlans._free", " or not serves(kept.plan, batch)", "",
        promises.test_what_the_backend_says_does_not_serve_is_made_anew,
    ),
    "what the backend refuses": (
        f"{_EAGER}:EagerPlans.renewed", "    check(batch)\n", "    pass\n",
        promises.test_steps_of_one_shape_share_a_plan,
    ),
    "captures, when plans are kept": (
        f"{_EAGER}:EagerPlans._open", "and not is_capturing(self._device)", "",
        promises.test_nothing_is_kept_or_used_in_a_capture,
    ),
    "modes that see operators": (
        f"{_EAGER}:EagerPlans._open", "and torch._C._len_torch_dispatch_stack() == 0", "",
        promises.test_under_a_mode_that_sees_operators_plans_are_made_anew,
    ),
    "inference mode": (
        f"{_EAGER}:EagerPlans._free", "kept.inference is inference", "True",
        promises.test_inference_mode_has_plans_of_its_own,
    ),
    "plans at fixed addresses": (
        f"{_EAGER}:layout_of", "not plan.stable and ", "", promises.test_plans_in_buffers_are_never_kept,
    ),
    "tables that windows trim": (
        f"{_EAGER}:layout_of", " and not trimmed", "",
        blocks(promises.test_tables_that_windows_trim_are_not_kept),
    ),
    "the room of lists": (
        f"{_COMPILER}.fit", "room = csr_entries(batch, form.kernel_page, self.table.max_context)", "pass",
        blocks(promises.test_a_list_without_room_is_made_anew),
    ),
    "vectors on the device": (
        f"{_COMPILER}.fit", "and batch.seq_lens.is_cpu", "",
        promises.test_vectors_that_are_not_on_the_host,
    ),
}  # fmt: skip


@contextmanager
def broken(name: str) -> Iterator[Callable[[Steps], None]]:
    where, old, new, promise = FAULTS[name]
    with applied(Mutant(name=name, where=where, old=old, new=new, names=())):
        yield promise


@pytest.mark.parametrize("name", FAULTS)
def test_reuse_that_overlooks(name: str) -> None:
    FAULTS[name][3](Steps(BLOCKS))
    with broken(name) as promise, pytest.raises((AssertionError, IndexError, RuntimeError)):
        promise(Steps(BLOCKS))


def test_reuse_that_overlooks_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Mutant(
        name="the stream", where=f"{_EAGER}:EagerPlans._free", old="kept.stream == stream", new="True",
        names=(),
    )  # fmt: skip
    with applied(fault), pytest.raises(AssertionError):
        promises.test_each_stream_has_plans_of_its_own(Steps(), monkeypatch)
