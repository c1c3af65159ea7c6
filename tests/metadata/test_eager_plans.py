"""Eager plans in the place of earlier ones: right when they are used again, never while anyone holds one."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from eager_steps import BLOCKS, CONTEXT, PAGE, PAGES, REQUEST_TABLE, REQUESTS, Steps, values

from anyattn.core.batch import ForwardBatch, ForwardMode, UpperBound
from anyattn.core.capturing import marked_as_capturing
from anyattn.core.groups import Space
from anyattn.core.metadata import eager as module
from anyattn.core.metadata.buffers import StepBuffers
from anyattn.core.plan import Plan, TableForm, TableKind
from anyattn.core.spec import Limits
from anyattn.errors import BatchError


@pytest.fixture(params=[REQUEST_TABLE, BLOCKS, PAGES], ids=["request-table", "block-table", "page-csr"])
def steps(request: pytest.FixtureRequest) -> Steps:
    return Steps(request.param)


def test_steps_of_one_shape_share_a_plan(steps: Steps) -> None:
    places = set()
    for lens in ((5, 9), (6, 10), (7, 11), (3, 12)):
        plan = steps.plan(steps.batch(*lens, first=lens[0]))
        places.add((id(plan), plan.seq_lens.data_ptr(), plan.write_locs[Space.FULL].data_ptr()))
        del plan
    assert len(places) == 1
    assert len(steps.checked) == 3, "whatever the backend refuses is refused"


def test_a_loop_that_holds_its_last_plan_uses_two(steps: Steps) -> None:
    places, plan = [], None
    for step in range(8):
        before = None if plan is None else values(plan)
        new = steps.plan(steps.batch(5 + step, 9))
        if plan is not None:
            assert new is not plan
            assert values(plan) == before
        plan = new
        places.append(id(plan))
        del new
    assert places[2:] == places[:-2]
    assert len(set(places)) == 2


def parts(plan: Plan) -> dict[str, Any]:
    table = next(iter(plan.tables.values()))
    loc = plan.listed_loc
    assert loc is not None
    weight = torch.zeros(CONTEXT, 3, requires_grad=True)
    return {
        "plan": plan, "positions": plan.positions, "lengths": plan.seq_lens, "rows": plan.req_pool_indices,
        "offsets": plan.query_offsets, "prefix": plan.prefix_lens, "slots": loc, "tables": plan.tables,
        "table": table, "start": table.kv_start, "write_locs": plan.write_locs, "bound": plan.write_loc,
        "view": plan.seq_lens[1:], "detached": plan.positions.detach(),
        "alias": plan.query_offsets.view(torch.uint8),
        "storage": plan.prefix_lens.untyped_storage(), "numpy": plan.positions.numpy(),
        "list of": [plan.extend_lens], "closure": (lambda held: lambda: held)(plan.extend_lens),
        "autograd": torch.nn.functional.embedding(plan.positions, weight),
        "row": (table.block_table if table.block_table is not None else table.kv_lens)[0],
    }  # fmt: skip


@pytest.mark.parametrize("name", list(parts(Steps().plan(Steps().batch(3)))))
def test_what_someone_holds_is_not_written_to(name: str, steps: Steps) -> None:
    plan = steps.plan(steps.batch(5, 9))
    held = parts(plan)[name]
    gc.collect()
    first, copy = plan.seq_lens.data_ptr(), values(plan)
    del plan
    other = steps.plan(steps.batch(6, 10))
    assert other.seq_lens.data_ptr() != first
    if name == "plan":
        assert values(held) == copy
    if name == "positions":
        assert held.tolist() == copy["positions"]
    del other, held
    gc.collect()
    found = {steps.plan(steps.batch(7, 11)).seq_lens.data_ptr() for _ in range(4)}
    assert first in found or len(found) == 1, "free again"


def test_a_tensor_bound_anew_by_a_caller_ends_the_reuse(steps: Steps) -> None:
    plan = steps.plan(steps.batch(5, 9))
    plan.seq_lens = plan.seq_lens.clone()
    del plan
    steps.plan(steps.batch(6, 10))


@pytest.mark.parametrize(
    "change",
    [
        {"lens": (5, 9, 3)},
        {"lens": (5,)},
        {"positions": [4, 8]},
        {"num_padding_requests": 1},
    ],
)
def test_other_shapes_and_fields(change: dict[str, Any], steps: Steps) -> None:
    first = steps.batch(5, 9)
    steps.plan(first)
    options = {**change}
    lens = options.pop("lens", (6, 10))
    steps.plan(steps.batch(*lens, **options))
    steps.plan(steps.batch(7, 11))
    steps.plan(steps.batch(*lens, **options))


def test_wider_block_tables_are_made_anew() -> None:
    steps = Steps(BLOCKS)
    assert steps.plan(steps.batch(5, 8)) is not steps.plan(steps.batch(5, 9)), "two pages, then four"
    assert [steps.plan(steps.batch(n, 16)).max_kv_len for n in (3, 9, 16)] == [16] * 3
    plans = (steps.plan(steps.batch(1, n)) for n in (20, 30, 6, 40))
    assert [next(iter(plan.tables.values())).blocks.shape[1] for plan in plans] == [6, 8, 2, 10]


@pytest.mark.parametrize("kind", [TableKind.TOKEN_CSR, TableKind.PAGE_CSR])
def test_lists_of_pages_have_room_for_later_steps(kind: TableKind) -> None:
    page = 1 if kind is TableKind.TOKEN_CSR else PAGE
    steps = Steps(TableForm(kind, kernel_page=page, index_slack=3))
    seen = {id(steps.plan(steps.batch(*lens))) for lens in ((5, 9), (6, 10), (1, 1), (30, 30))}
    assert len(seen) == 1


def test_a_list_without_room_is_made_anew() -> None:
    steps = Steps(TableForm(TableKind.TOKEN_CSR))
    short, full = ([n] * REQUESTS for n in (5, CONTEXT))
    plans = [id(steps.plan(steps.batch(*lens))) for lens in (short, full, short, full)]
    assert plans[0] == plans[2] != plans[1] == plans[3]


def test_tables_that_windows_trim_are_not_kept() -> None:
    for form in (BLOCKS, TableForm(TableKind.PAGE_CSR, kernel_page=PAGE)):
        trimmed = Steps(form, window=6)
        for lens in ((5, 9), (30, 10)):
            trimmed.plan(trimmed.batch(*lens))
        assert not trimmed.eager._plans


def test_windows_of_request_tables() -> None:
    steps = Steps(window=6)
    seen = {id(steps.plan(steps.batch(*lens))) for lens in ((5, 9), (30, 10), (3, 50))}
    assert len(seen) == 1


def test_bounds_in_place_of_lengths(steps: Steps) -> None:
    exact = steps.batch(5, 9)
    for lens in (exact.host_lens, UpperBound(40), UpperBound(12), None, exact.host_lens):
        batch = exact.view(host_lens=lens)
        steps.plan(batch)


def test_other_modes_are_made_anew(steps: Steps) -> None:
    steps.plan(steps.batch(5, 9))
    loc = [int(steps.table.req_to_token[row, 4]) for row in (0, 1)]
    extend = ForwardBatch.extend([0, 1], [4, 4], [1, 1], loc)
    for mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
        plan = steps.compiler.prepare(extend.view(forward_mode=mode))
        assert steps.eager.kept(plan) is plan
        assert steps.eager.renewed(plan.batch, steps.checked.append, steps.serves) is None
    assert len(steps.eager._plans) == 1


def test_what_the_backend_says_does_not_serve_is_made_anew(steps: Steps) -> None:
    steps.plan(steps.batch(5, 9))
    asked: list[tuple[Plan, ForwardBatch]] = []
    steps.serves = lambda plan, batch: bool(asked.append((plan, batch)))
    batch = steps.batch(6, 10)
    plan = steps.plan(batch)
    assert asked[0][1] is batch
    assert asked[0][0] is not plan
    assert asked[0][0].batch is not batch, "asked before anything was written"


def test_plans_may_be_taken_by_another_thread_meanwhile(steps: Steps) -> None:
    """While the backend is asked about one plan, somebody else takes another: both get their own."""
    one, two = steps.plan(steps.batch(5)), steps.plan(steps.batch(6, 7))
    del one, two
    taken: list[Plan | None] = []

    def serves(plan: Plan, batch: ForwardBatch) -> bool:
        if not taken:
            taken.append(None)
            taken[0] = steps.eager.renewed(steps.batch(8), steps.checked.append, lambda plan, batch: True)
        return True

    steps.serves = serves
    plan = steps.plan(steps.batch(7, 8))
    assert taken[0] is not None
    assert taken[0] is not plan
    assert taken[0].seq_lens.tolist() == [8]
    assert plan.seq_lens.tolist() == [7, 8]


def test_a_refused_batch_changes_nothing(steps: Steps) -> None:
    steps.plan(steps.batch(5, 9))
    place = steps.eager._plans[0].plan.seq_lens.data_ptr()
    wrong = (
        ForwardBatch.decode([0, 1], [5, 9], [8, 8]),
        ForwardBatch.decode([0, 99], [5, 9], [8, 9]),
        ForwardBatch.decode([0, 1], [5, CONTEXT + 1], [8, 9]),
    )
    for batch in wrong:
        with pytest.raises(BatchError):
            steps.plan(batch)
        assert len(steps.eager._plans) == 1
    assert steps.plan(steps.batch(6, 10)).seq_lens.data_ptr() == place


def test_an_error_half_way_leaves_a_plan_that_is_written_in_whole(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps.plan(steps.batch(5, 9))
    steps.compiler.filler = lambda plan: plan.no_such_field  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        steps.plan(steps.batch(6, 10))
    steps.compiler.filler = None
    with monkeypatch.context() as patched:
        patched.setattr(torch, "_foreach_copy_", _torn)
        with pytest.raises(RuntimeError, match="torn"):
            steps.plan(steps.batch(7, 11))
    steps.plan(steps.batch(8, 12))


def _torn(targets: list[torch.Tensor], sources: Any) -> None:
    targets[0].copy_(sources[0])
    raise RuntimeError("torn")


def test_nothing_is_kept_or_used_in_a_capture(steps: Steps) -> None:
    with marked_as_capturing():
        captured = steps.compiler.prepare(steps.batch(5, 9))
        steps.eager.kept(captured)
    assert not steps.eager._plans
    steps.plan(steps.batch(5, 9))
    with marked_as_capturing():
        assert steps.eager.renewed(steps.batch(6, 10), steps.checked.append, steps.serves) is None


def test_plans_in_buffers_are_never_kept(steps: Steps) -> None:
    buffers = StepBuffers(Limits(REQUESTS, REQUESTS, CONTEXT), steps.compiler.form, torch.device("cpu"))
    steps.eager.kept(steps.compiler.prepare(steps.batch(5, 9), buffers))
    assert not steps.eager._plans


def test_each_stream_has_plans_of_its_own(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    current = 11
    monkeypatch.setattr(steps.eager, "_stream", lambda: current)
    first = steps.plan(steps.batch(5, 9)).seq_lens.data_ptr()
    current = 22
    second = steps.plan(steps.batch(6, 10)).seq_lens.data_ptr()
    assert second != first
    assert steps.plan(steps.batch(7, 11)).seq_lens.data_ptr() == second
    current = 11
    assert steps.plan(steps.batch(8, 12)).seq_lens.data_ptr() == first


def test_inference_mode_has_plans_of_its_own(steps: Steps) -> None:
    for _ in range(2):
        with torch.inference_mode():
            assert steps.plan(steps.batch(5, 9)).seq_lens.is_inference()
        assert not steps.plan(steps.batch(6, 10)).seq_lens.is_inference()
    assert len(steps.eager._plans) == 2


def test_under_a_mode_that_sees_operators_plans_are_made_anew(steps: Steps) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Silent(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    steps.plan(steps.batch(5, 9))
    kept = steps.eager._plans[0].plan
    with Silent():
        assert steps.plan(steps.batch(6, 10)) is not kept
    batch = steps.batch(6, 10)
    with FakeTensorMode():
        assert steps.eager.renewed(batch, steps.checked.append, steps.serves) is None
    assert [each.plan for each in steps.eager._plans] == [kept]


def test_only_so_many_plans_are_kept(steps: Steps) -> None:
    held = [steps.plan(steps.batch(5, 9)) for _ in range(9)]
    assert len({id(plan) for plan in held}) == 9
    assert len(steps.eager._plans) == module._COUNT
    del held
    for count in range(1, REQUESTS):
        steps.plan(steps.batch(*[5] * count))
    assert len(steps.eager._plans) == module._COUNT


def test_vectors_that_are_not_on_the_host(steps: Steps) -> None:
    """A plan has copied them to memory apart; a kept one has no place for them."""
    steps.plan(steps.batch(5, 9))
    kept = steps.eager._plans[0]
    batch = steps.batch(6, 10)
    for name in ("req_pool_indices", "seq_lens", "extend_seq_lens", "out_cache_loc"):
        elsewhere = batch.view(**{name: getattr(batch, name).to("meta")})
        assert steps.compiler.fit(elsewhere) is None
        assert steps.eager._free(elsewhere, steps.serves) is None
    assert steps.compiler.fit(batch) == kept.fit


def test_without_counts_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEEN", False)
    steps = Steps()
    for lens in ((5, 9), (6, 10)):
        steps.plan(steps.batch(*lens))
    assert not steps.eager._plans
