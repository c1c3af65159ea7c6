"""Ragged, paged and merged: chosen per step from host lengths, and equal in what they give."""

import pytest
import torch
from test_contract import SPEC, backend, qkv  # type: ignore[import-not-found]

import anyattn
from anyattn import AttentionState
from anyattn.backends.reference.attend import attend
from anyattn.backends.reference.torch_native import TorchNative
from anyattn.core.batch import UpperBound
from anyattn.core.call import AttentionCall
from anyattn.core.strategy import Strategy, choose_strategy
from anyattn.core.traits import Traits
from anyattn.errors import PlanError

ALL = tuple(Strategy)


class Merging(TorchNative):
    """A family with a ragged kernel and a paged one: new tokens alone, the prefix alone, then merged."""

    def traits(self, mode: anyattn.ForwardMode) -> Traits:
        return Traits(strategies=ALL)

    def forward_extend(self, call: AttentionCall) -> None:
        plan, spec = call.plan, call.layer.spec
        assert call.k is not None
        assert call.v is not None
        for i, rows in enumerate(plan.private.rows[None]):
            position = plan.positions[rows.q]
            state = self._part(call, rows.q, call.k[rows.q], call.v[rows.q], position)
            if plan.strategy is Strategy.RAGGED_MERGE:
                assert call.table is not None
                indptr, slots = call.table.csr
                k, v = self.pool.gather(call.layer.layer_id, slots[indptr[i] : indptr[i + 1]])
                start = int(call.table.kv_start[i])
                assert k.shape[0] == rows.prefix - start, "the table lists the prefix alone"
                state = state.merge(self._part(call, rows.q, k, v, torch.arange(start, rows.prefix)))
            state = state.finalise(call.layer.sinks)
            call.out[rows.q] = state.out
            if call.lse is not None:
                call.lse[rows.q] = state.lse
        assert spec.kind is anyattn.AttentionKind.CAUSAL

    def _part(
        self, call: AttentionCall, rows: slice, k: torch.Tensor, v: torch.Tensor, k_pos: torch.Tensor
    ) -> AttentionState:
        q, spec = call.q[rows], call.layer.spec
        out, lse = torch.empty(*q.shape[:2], spec.v_head_dim), torch.empty(q.shape[:2])
        q_pos = call.plan.positions[rows]
        seen = (q_pos[:, None] >= k_pos[None, :]) if len(k_pos) else None
        if seen is not None and spec.sliding_window is not None:
            seen &= q_pos[:, None] - k_pos[None, :] < spec.sliding_window
        attend(q, k, v, spec, seen, out, lse, None, empty_rows=True)
        return AttentionState(out, lse)


def test_choice_follows_the_prefixes() -> None:
    whole = anyattn.ForwardBatch.extend([0, 1], [0, 0], [2, 1], None)
    cached = anyattn.ForwardBatch.extend([0, 1], [0, 4], [2, 1], None)
    assert choose_strategy(whole, ALL) is Strategy.RAGGED
    assert choose_strategy(cached, ALL) is Strategy.RAGGED_MERGE
    assert choose_strategy(whole, (Strategy.PAGED,)) is Strategy.PAGED
    assert choose_strategy(cached, (Strategy.PAGED, Strategy.RAGGED)) is Strategy.PAGED
    assert choose_strategy(whole.view(host_lens=None), ALL) is Strategy.PAGED
    assert choose_strategy(whole.view(host_lens=UpperBound(9, 9)), ALL) is Strategy.PAGED


@pytest.mark.parametrize("window", [None, 1, 3, 5, 20])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("prefix", [(0, 0), (7, 0), (4, 13)])
def test_merged_equals_paged(window: int | None, sinks: bool, prefix: tuple[int, int]) -> None:
    spec = anyattn.AttentionSpec(
        num_q_heads=4, num_kv_heads=2, head_dim=8, sliding_window=window, sinks=sinks
    )
    paged = backend([spec])
    merging = Merging(paged.config)
    layer = anyattn.AttentionLayer(spec, 0, sinks=torch.randn(4) if sinks else None)
    extend = (5, 3)
    loc = []
    for row, (p, e) in enumerate(zip(prefix, extend, strict=True)):
        slots = torch.randperm(28)[: p + e] + 4 + 30 * row
        paged.table.req_to_token[row, : p + e] = slots.int()
        paged.pool.write(0, slots, torch.randn(p + e, 2, 8), torch.randn(p + e, 2, 8))
        loc += slots[p:].tolist()
    batch = anyattn.ForwardBatch.extend([0, 1], prefix, extend, loc)
    q, k, v = qkv(8, spec)
    results = []
    for made in (paged, merging):
        plan = made.init_forward_metadata(batch)
        with anyattn.forward_context(made, plan):
            results.append(layer(q, k, v, batch, return_lse=True))
    wanted = Strategy.RAGGED_MERGE if any(prefix) else Strategy.RAGGED
    assert plan.strategy is wanted
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want)


def test_reading_all_from_the_pool_needs_a_table() -> None:
    plain = backend()
    made, layer = Merging(plain.config), anyattn.AttentionLayer(SPEC, 0)
    batch = anyattn.ForwardBatch.extend([0], [0], [3], [4, 5, 6])
    made.table.req_to_token[0, :3] = torch.tensor([4, 5, 6], dtype=torch.int32)
    plan = made.init_forward_metadata(batch)
    with anyattn.forward_context(made, plan), pytest.raises(PlanError, match="k and v of this step"):
        layer(torch.randn(3, 4, 8), None, None, batch)
