"""What FlashInfer's planners are given, decided from data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flashinfer_steps import spec  # type: ignore[import-not-found]

from anyattn.backends.cuda.flashinfer_plan import (
    HostArrays,
    PageArrays,
    accepts,
    merge_fits,
    uses_tensor_cores,
    window_left,
    workspace_bytes,
)
from anyattn.core.batch import ForwardBatch
from anyattn.core.groups import PlanGroup, Space, TableGroup
from anyattn.core.plan import HostTable, Plan, Table, TableForm, TableKind
from anyattn.core.strategy import Strategy
from anyattn.errors import HostLengthError

HALF, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("heads", "changes", "kv_dtype", "cores"),
    [
        (2, {}, HALF, False),
        (6, {}, HALF, False),
        (8, {}, HALF, True),
        (10, {}, HALF, True),
        (2, {}, FP8, True),
        (2, {"head_dim": 512}, HALF, True),
    ],
)
def test_tensor_cores_by_group_size(
    heads: int, changes: dict[str, Any], kv_dtype: torch.dtype, cores: bool
) -> None:
    group = PlanGroup.of(spec(num_q_heads=heads, **changes))
    assert uses_tensor_cores(group, heads, HALF, kv_dtype) is cores


def test_windows_count_the_keys_to_the_left() -> None:
    assert (window_left(None), window_left(1), window_left(128)) == (-1, 0, 127)


def test_the_merge_takes_as_many_heads_as_a_block_has_threads() -> None:
    assert merge_fits(64, 128, 2)
    assert not merge_fits(65, 128, 2)
    assert merge_fits(128, 64, 2)
    assert not merge_fits(8, 96, 2)


def test_workspace_grows_with_the_group() -> None:
    groups = tuple((PlanGroup.of(spec(num_q_heads=2 * n)), 2 * n) for n in (1, 4000))
    cpu = torch.device("cpu")
    assert workspace_bytes(groups[:1], cpu) == 128 << 20
    assert workspace_bytes(groups, cpu) == 2 * 128 * 4000 * 65 * 4


def test_signatures_are_asked_not_versions() -> None:
    def old(indptr: Any, *, window_left: int = -1) -> None: ...
    def new(indptr: Any, **kwargs: Any) -> None: ...

    assert [accepts(f, "seq_lens") for f in (old, new)] == [False, True]
    assert accepts(old, "window_left")


def _plan(batch: ForwardBatch) -> Plan:
    plan = Plan.__new__(Plan)
    plan.batch, plan.strategy = batch, Strategy.PAGED
    plan.key = type("Key", (), {"num_requests": batch.batch_size, "mode": batch.forward_mode})()  # type: ignore[assignment]
    return plan


FORM = TableForm(TableKind.PAGE_CSR, kernel_page=4)
NONE = torch.empty(0, dtype=torch.int32)


def _lists(pages: PageArrays) -> list[list[int]]:
    return [pages.indptr.tolist(), pages.last.tolist(), pages.lens.tolist()]


def test_host_arrays() -> None:
    host = HostArrays(_plan(ForwardBatch.extend([0, 1, 2], [9, 0, 4], [3, 1, 0], None)))
    assert host.qo_indptr.tolist() == [0, 3, 4, 4]
    assert host.num_tokens == 4
    table = Table(FORM, NONE, NONE)
    pages = host.pages(TableGroup(), table)
    assert _lists(pages) == [[0, 3, 4, 5], [4, 1, 4], [12, 1, 4]]
    arrays = (pages.indptr, pages.last, pages.lens)
    assert all(a.dtype == torch.int32 and a.is_cpu for a in arrays)
    assert host.pages(TableGroup(), table) is pages, "once a step"


@pytest.mark.parametrize("group", [TableGroup(window=5), TableGroup(space=Space.ENCODER)])
def test_what_a_table_lists_is_asked_for_where_it_is_not_everything(group: TableGroup) -> None:
    host = HostArrays(_plan(ForwardBatch.extend([0, 1], [9, 0], [3, 1], None)))
    table = Table(FORM, NONE, NONE)
    table.__dict__["host"] = HostTable(NONE, torch.tensor([7, 0], dtype=torch.int32))
    assert _lists(host.pages(group, table)) == [[0, 2, 2], [3, 0], [7, 0]]
    merged = _plan(ForwardBatch.extend([0, 1], [9, 0], [3, 1], None))
    merged.strategy = Strategy.RAGGED_MERGE
    lens = HostArrays(merged).pages(TableGroup(), table).lens
    assert lens.tolist() == [7, 0], "the cached part alone"


@pytest.mark.parametrize("page", [1, 3, 16])
def test_page_arrays(page: int) -> None:
    lens = torch.tensor([0, 1, page, page + 1, 5 * page - 1, 0], dtype=torch.int64)
    indptr, last, tokens = _lists(PageArrays(lens, page))
    counts = [-(-n // page) for n in lens.tolist()]
    assert indptr == [sum(counts[:i]) for i in range(len(counts) + 1)]
    rows = zip(lens.tolist(), counts, strict=True)
    assert last == [n - (c - 1) * page if n else 0 for n, c in rows]
    assert tokens == lens.tolist()
    same = lens.to(torch.int32)
    assert PageArrays(same, page).lens.data_ptr() != same.data_ptr(), "nobody keeps the batch's own lengths"


def test_encoder_lengths_are_asked_for_on_the_host() -> None:
    host = HostArrays(_plan(ForwardBatch.extend([0], [9], [3], None)))
    with pytest.raises(HostLengthError, match="encoder"):
        host.pages(TableGroup(space=Space.ENCODER), Table(FORM, NONE, NONE))
