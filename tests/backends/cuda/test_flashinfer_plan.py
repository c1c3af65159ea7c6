"""What FlashInfer's planners are given, decided from data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flashinfer_steps import spec  # type: ignore[import-not-found]

from anyattn.backends.cuda.flashinfer_plan import (
    HostArrays,
    accepts,
    merge_fits,
    uses_tensor_cores,
    window_left,
    workspace_bytes,
)
from anyattn.core.batch import ForwardBatch
from anyattn.core.groups import PlanGroup
from anyattn.core.plan import HostTable, Plan, Table, TableForm, TableKind
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
    plan.batch = batch
    plan.key = type("Key", (), {"num_requests": batch.batch_size, "mode": batch.forward_mode})()  # type: ignore[assignment]
    return plan


def test_host_arrays() -> None:
    host = HostArrays(_plan(ForwardBatch.extend([0, 1, 2], [9, 0, 4], [3, 1, 0], None)))
    assert host.qo_indptr.tolist() == [0, 3, 4, 4]
    assert host.num_tokens == 4
    form = TableForm(TableKind.PAGE_CSR, kernel_page=4)
    none = torch.empty(0, dtype=torch.int32)
    lens = torch.tensor([12, 1, 0], dtype=torch.int32)
    table = Table(form, none, none)
    table.__dict__["host"] = HostTable(torch.tensor([0, 3, 4, 4], dtype=torch.int32), lens)
    indptr, last, given = host.pages(table)
    assert (indptr.tolist(), last.tolist(), given.tolist()) == ([0, 3, 4, 4], [4, 1, 0], [12, 1, 0])
    assert host.pages(table)[1] is last, "once a step"


def test_encoder_lengths_are_asked_for_on_the_host() -> None:
    host = HostArrays(_plan(ForwardBatch.extend([0], [9], [3], None)))
    none = torch.empty(0, dtype=torch.int32)
    with pytest.raises(HostLengthError, match="encoder"):
        host.pages(Table(TableForm(TableKind.PAGE_CSR, kernel_page=4), none, none))
