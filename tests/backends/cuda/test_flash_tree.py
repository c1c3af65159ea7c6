"""Explicit masks as tables of the keys that each query sees."""

from __future__ import annotations

import pytest
import torch
from flash_stands import TOKENSPEED, backend_of, slots, spec, watched

import anyattn
from anyattn.testing.emulators import emulating
from anyattn.testing.judge import check_case

MODULE = "flash_attn_interface"
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
"""Two branches below the root; the second is two drafts long."""


def verify(form: anyattn.TreeMaskMode) -> anyattn.ForwardBatch:
    """Two requests with prefixes of 5 and 20 and the tree's four drafts each."""
    mask = anyattn.VerifyMask.allocate(form, max_requests=2, draft_tokens=4, max_context=24)
    full = form is anyattn.TreeMaskMode.FULL_MASK
    parts = [torch.cat([torch.ones(4, n * full, dtype=torch.bool), TREE], 1).flatten() for n in (5, 20)]
    cells = torch.cat(parts)
    mask.buffer[: cells.numel()] = cells
    positions = [n + depth for n in (5, 20) for depth in (0, 1, 1, 2)]
    new = [*slots(0, 5, 4), *slots(1, 20, 4)]
    return anyattn.ForwardBatch.verify([0, 1], [5, 20], [4, 4], new, mask=mask, positions=positions)


def run(backend: object, batch: anyattn.ForwardBatch, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    plan = backend.init_forward_metadata(batch)  # type: ignore[attr-defined]
    layer = anyattn.AttentionLayer(spec(), 0)
    with anyattn.forward_context(backend, plan):  # type: ignore[arg-type]
        return layer(q, k, k, batch)  # type: ignore[return-value]


def test_drafts_are_listed_row_by_row_and_the_prefix_is_read_once() -> None:
    q, k = (torch.randn(8, heads, 64).to(torch.bfloat16) for heads in (4, 2))
    outs = []
    for form, passes in ((anyattn.TreeMaskMode.QLEN_ONLY, 2), (anyattn.TreeMaskMode.FULL_MASK, 1)):
        with watched("fa3", TOKENSPEED, MODULE) as (paged, _, _):
            backend = backend_of("fa3", TOKENSPEED, [spec()])
            torch.manual_seed(1)
            for cache in (backend.pool.key_cache(0), backend.pool.value_cache(0)):
                cache.copy_(torch.randn(cache.shape))
            outs.append(run(backend, verify(form), q, k))
        assert len(paged.seen) == passes
        own = paged.seen[0]
        first = 0 if form is anyattn.TreeMaskMode.FULL_MASK else 5
        assert own["cache_seqlens"].tolist()[:4] == [5 - first + n for n in (1, 2, 2, 3)]
        row = own["page_table"][3, : own["cache_seqlens"][3]].tolist()
        assert row == [*range(16 + first, 16 + 5), 16 + 5, 16 + 7, 16 + 8]  # the root, then its second branch
        assert own["k_cache"].shape[1] == 1
        assert own["max_seqlen_q"] == 1
        assert not any(call["causal"] for call in paged.seen)
    assert paged.seen[-1]["cu_seqlens_q"].tolist() == list(range(9))
    assert float((outs[0].float() - outs[1].float()).abs().max()) < 2e-2


def test_the_prefix_pass_reads_the_groups_table() -> None:
    q, k = (torch.randn(8, heads, 64).to(torch.bfloat16) for heads in (4, 2))
    with watched("fa3", TOKENSPEED, MODULE) as (paged, _, schedules):
        backend = backend_of("fa3", TOKENSPEED, [spec()])
        run(backend, verify(anyattn.TreeMaskMode.QLEN_ONLY), q, k)
    _, prefix = paged.seen
    assert prefix["cache_seqlens"].tolist() == [5, 20]
    assert prefix["page_table"][1, :2].tolist() == [9, 10]
    assert prefix["cu_seqlens_q"].tolist() == [0, 4, 8]
    assert "scheduler_metadata" not in prefix
    assert not schedules.seen  # a schedule is for the causal call, which a masked step doesn't make


def test_rows_keep_their_address_under_graphs() -> None:
    with emulating("fa3", TOKENSPEED):
        backend = backend_of("fa3", TOKENSPEED, [spec()])
        backend.init_cuda_graph_state(backend.config.limits)
        plans = [
            backend.init_forward_metadata_out_graph(verify(anyattn.TreeMaskMode.QLEN_ONLY), in_capture=True)
            for _ in range(2)
        ]
        eager = backend.init_forward_metadata(verify(anyattn.TreeMaskMode.QLEN_ONLY))
    first, second = (plan.private.tree for plan in plans)
    assert first.table.data_ptr() == second.table.data_ptr()
    assert first.table.shape == (8, 8)  # Limits.max_draft_tokens wide, for any batch of this shape
    assert eager.private.tree.table.data_ptr() != first.table.data_ptr()
    assert eager.private.tree.table.shape == (8, 4)


@pytest.mark.parametrize("mask", ["tree", "random"])
def test_masks_with_sinks_scales_and_fp8(mask: str) -> None:
    from anyattn.testing.cases import Case

    common = {"mode": "verify", "prefix_lens": (3, 0, 17), "extend_lens": (4, 6, 1), "mask": mask}
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "page_size": 4}
    half = Case(**common, **shape, dtype="bfloat16", kv_dtype="bfloat16", sinks=True, scale=0.3)  # type: ignore[arg-type]
    fp8 = Case(
        **common, **shape, dtype="bfloat16", kv_dtype="float8_e4m3fn", k_scale=(0.5, 2.0), v_scale=0.25
    )  # type: ignore[arg-type]
    for case in (half, fp8):
        report = check_case(case, backend="fa3", host=TOKENSPEED, emulated=True)
        assert report.passed, str(report)
