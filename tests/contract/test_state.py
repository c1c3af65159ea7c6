"""Partial states: exact merging in natural log, sinks counted once."""

import pytest
import torch

from anyattn import AttentionState
from anyattn.errors import PlanError


def softmax_state(scores: torch.Tensor, values: torch.Tensor) -> AttentionState:
    """`scores [T, H, K]`, `values [K, H, Dv]`."""
    lse = torch.logsumexp(scores, -1)
    out = torch.einsum("thk,khd->thd", torch.softmax(scores, -1), values)
    return AttentionState(out, lse.float())


@pytest.mark.parametrize("heads", [1, 9, 65, 128])
def test_merge_equals_attention_over_both_halves(heads: int) -> None:
    scores, values = torch.randn(3, heads, 10) * 5, torch.randn(10, heads, 4)
    whole = softmax_state(scores, values)
    merged = softmax_state(scores[..., :7], values[:7]).merge(softmax_state(scores[..., 7:], values[7:]))
    torch.testing.assert_close(merged.out, whole.out)
    torch.testing.assert_close(merged.lse, whole.lse)


def test_empty_states_merge_without_nan() -> None:
    empty = AttentionState(torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf))
    both = empty.merge(empty)
    assert torch.equal(both.out, torch.zeros(2, 3, 4))
    assert bool(torch.isneginf(both.lse).all())
    full = softmax_state(torch.randn(2, 3, 5), torch.randn(5, 3, 4))
    for merged in (full.merge(empty), empty.merge(full)):
        assert torch.equal(merged.out, full.out)
        assert torch.equal(merged.lse, full.lse)


def test_sinks_enter_once_at_the_end() -> None:
    scores, values, sinks = torch.randn(2, 3, 8), torch.randn(8, 3, 4), torch.randn(3)
    state = softmax_state(scores[..., :4], values[:4]).merge(softmax_state(scores[..., 4:], values[4:]))
    ended = state.finalise(sinks)
    wide = torch.cat((scores, sinks.expand(2, 3)[..., None]), -1)
    want = torch.einsum("thk,khd->thd", torch.softmax(wide, -1)[..., :-1], values)
    torch.testing.assert_close(ended.out, want)
    torch.testing.assert_close(ended.lse, torch.logsumexp(wide, -1))
    assert state.finalise(None) is state


def test_wrong_lse_is_refused() -> None:
    with pytest.raises(PlanError, match="float32"):
        AttentionState(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(PlanError):
        AttentionState(torch.zeros(2, 3, 4), torch.zeros(3, 2))
