"""Draft steps with several branches, the draft's own backend, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from spec_drafts import SPEC, decide, run_draft

import anyattn
from anyattn.core.capabilities import FormSpec, PageSizes, Phase
from anyattn.core.wrappers.hybrid import HybridBackend
from anyattn.errors import BatchError, ConfigError, FeatureError
from anyattn.testing.cases import Case
from anyattn.testing.judge import check_case


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_every_branch_reads_its_prefix_and_its_own_chain(page: int, layout: str) -> None:
    for seed in range(4):
        assert run_draft(page, seed, layout=layout) < 1e-5


def test_one_branch_is_a_chain() -> None:
    assert run_draft(4, 1, top_k=1, steps=5) < 1e-5


def test_the_tree_of_a_draft() -> None:
    """Nodes by step and branch; a branch continues the one that it is told to."""
    info = anyattn.speculative.DraftInfo(max_requests=1, top_k=2, max_steps=3, max_context=16)
    source = anyattn.kv.RequestTable(max_requests=1, max_context=8)
    source.req_to_token[0, :3] = torch.tensor([9, 8, 7])
    info.begin(source, [0], [3])
    info.step(torch.tensor([[20, 21]]))
    info.step(torch.tensor([[30, 31]]), torch.tensor([[1, 1]]))
    batch = info.step(torch.tensor([[40, 41]]), torch.tensor([[0, 1]]))
    assert info.parents.tolist() == [[-1, 0, 0, 2, 2, 3, 4]]
    assert info.table.req_to_token[:2, :6].tolist() == [[9, 8, 7, 21, 30, 40], [9, 8, 7, 21, 31, 41]]
    assert batch.seq_lens.tolist() == [6, 6]
    assert batch.exact is not None
    assert source.req_to_token[0, :4].tolist() == [9, 8, 7, 0]


def test_drafts_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="sizes of a draft"):
        anyattn.speculative.DraftInfo(max_requests=1, top_k=0, max_steps=1, max_context=8)
    info = anyattn.speculative.DraftInfo(max_requests=1, top_k=2, max_steps=1, max_context=8)
    source = anyattn.kv.RequestTable(max_requests=3, max_context=8)
    with pytest.raises(BatchError, match="or none begun"):
        info.step(torch.tensor([[1, 2]]))
    for rows, seq in (([0, 1], [1, 1]), ([0], [8])):
        with pytest.raises(BatchError, match="no room for"):
            info.begin(source, rows, seq)
    with pytest.raises(BatchError, match="narrower than the request table"):
        info.begin(anyattn.kv.RequestTable(max_requests=1, max_context=9), [0], [1])
    info.begin(source, [0], [3])
    with pytest.raises(BatchError, match="slots of a draft step"):
        info.step(torch.tensor([[1, 2, 3]]))
    with pytest.raises(BatchError, match="a branch that doesn't exist"):
        info.step(torch.tensor([[1, 2]]), torch.tensor([[0, 2]]))
    info.step(torch.tensor([[1, 2]]))
    with pytest.raises(BatchError, match="more draft steps than planned"):
        info.step(torch.tensor([[1, 2]]))


def test_a_backend_that_reads_pages_runs_no_branches() -> None:
    decision = decide(16, "NHD")
    assert decision.draft is not None
    row = dataclasses.replace(
        decision.draft.row, form=FormSpec("block_table"), pages=PageSizes(multiple_of=16)
    )
    paged = dataclasses.replace(
        decision, draft=dataclasses.replace(decision.draft, backend="paged", row=row, kernel_page=16)
    )
    pool = anyattn.kv.create_pool(decision, num_slots=64)
    table = anyattn.kv.RequestTable(max_requests=2, max_context=8)
    with pytest.raises(FeatureError, match="paged reads whole pages"):
        anyattn.create_draft_backend(paged, pool, table, branches=2)


def test_the_draft_backend_is_the_one_chosen_for_its_role() -> None:
    """Where prefill is another object, DECODE and DRAFT_EXTEND go to the draft's."""
    decision = decide(4, "NHD")
    pool = anyattn.kv.create_pool(decision, num_slots=64)
    table = anyattn.kv.RequestTable(max_requests=2, max_context=8)
    one = anyattn.create_draft_backend(decision, pool, table)
    assert not isinstance(one, HybridBackend)
    assert one.decision is decision
    assert set(one.config.rows) == {Phase.DECODE, Phase.DRAFT, Phase.PREFILL}
    assert decision.draft is not None
    apart = dataclasses.replace(decision, draft=dataclasses.replace(decision.draft, backend="other"))
    both = anyattn.create_draft_backend(apart, pool, table)
    assert isinstance(both, HybridBackend)
    for mode in (anyattn.ForwardMode.DECODE, anyattn.ForwardMode.DRAFT_EXTEND):
        assert both.child(mode).config.name == "other"
    assert both.child(anyattn.ForwardMode.EXTEND).config.name == "torch_native"


@pytest.mark.parametrize("seed", range(6))
def test_draft_extend_reads_whole_sequences(seed: int) -> None:
    """`seq_lens` counts the step's own tokens here as everywhere."""
    case = Case(
        mode="draft_extend", prefix_lens=(5, 0, 17), extend_lens=(1 + seed, 3, 2), page_size=4,
        window=None if seed % 2 else 6, num_q_heads=2, seed=seed,
    )  # fmt: skip
    report = check_case(case)
    assert report.passed, str(report)
    assert SPEC.num_q_heads == 4
