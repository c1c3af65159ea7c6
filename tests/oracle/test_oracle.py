"""The judge itself, against numbers worked out by hand and against torch's SDPA where that can say it."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from anyattn.testing.oracle import (
    OracleRequest,
    attend,
    is_visible,
    read_slots,
    relative_error,
    stored_values,
)

LN2, LN3 = math.log(2.0), math.log(3.0)


def column(*values: float) -> torch.Tensor:
    """`[n, 1, 1]`: n tokens or slots, one head of size 1."""
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


def one_query(
    keys: torch.Tensor, values: torch.Tensor, slots: list[int], **options: object
) -> tuple[float, float]:
    request = OracleRequest(slots=slots, num_queries=1)
    out, lse = attend(column(1.0), keys, values, [request], scale=1.0, **options)
    return float(out), float(lse)


def test_two_keys_by_hand() -> None:
    """Logits ln 3 and 0: weights 3/4 and 1/4, LSE ln 4."""
    out, lse = one_query(column(LN3, 0.0), column(8.0, -4.0), [0, 1])
    assert out == pytest.approx(8 * 0.75 - 4 * 0.25)
    assert lse == pytest.approx(math.log(4.0))


def test_slots_are_read_in_table_order_and_nan_elsewhere_is_not_touched() -> None:
    keys, values = column(math.nan, 0.0, math.nan, LN3), column(math.nan, -4.0, math.nan, 8.0)
    out, lse = one_query(keys, values, [3, 1])
    assert (out, lse) == (pytest.approx(5.0), pytest.approx(math.log(4.0)))


def test_scale_comes_before_the_cap() -> None:
    """2 * (0.5 * ln 3) = ln 3, then c tanh(ln 3 / c) with c = 1: tanh(ln 3) = 0.8."""
    request = OracleRequest(slots=[0], num_queries=1)
    _, lse = attend(column(2.0), column(LN3), column(7.0), [request], scale=0.5, logit_cap=1.0)
    assert float(lse) == pytest.approx(0.8)


def test_sink_takes_weight_and_adds_no_value() -> None:
    """Logits ln 3, 0 and a sink of ln 4: weights 3/8, 1/8 (1/2 lost), LSE ln 8."""
    out, lse = one_query(column(LN3, 0.0), column(8.0, 16.0), [0, 1], sinks=torch.tensor([math.log(4.0)]))
    assert out == pytest.approx(8 * 3 / 8 + 16 / 8)
    assert lse == pytest.approx(math.log(8.0))


def test_sink_is_not_capped() -> None:
    _, lse = one_query(column(0.0), column(1.0), [0], logit_cap=0.5, sinks=torch.tensor([math.log(7.0)]))
    assert lse == pytest.approx(math.log(8.0))


def test_query_without_keys() -> None:
    request = OracleRequest(slots=[], num_queries=2)
    query, none = torch.ones(2, 2, 4), torch.empty(0, 1, 4)
    out, lse = attend(query, none, none, [request], scale=1.0, kind="cross")
    assert torch.equal(out, torch.zeros(2, 2, 4, dtype=torch.float64))
    assert torch.isneginf(lse).all()
    out, lse = attend(query, none, none, [request], scale=1.0, kind="cross", sinks=torch.tensor([1.5, -2.0]))
    assert torch.equal(out, torch.zeros(2, 2, 4, dtype=torch.float64))
    assert torch.equal(lse, torch.tensor([[1.5, -2.0]] * 2, dtype=torch.float64))


def visible_keys(request: OracleRequest, query: int, **rules: object) -> list[int]:
    return [k for k in range(len(request.slots)) if is_visible(request, query, k, **rules)]


def test_causal_window_counts_the_own_key() -> None:
    """Prefix 4, new tokens at positions 4 and 5: W = 3 shows 2..4 and 3..5; W = 1 only the own key."""
    request = OracleRequest(slots=range(6), num_queries=2)
    assert visible_keys(request, 0, kind="causal", window=None) == [0, 1, 2, 3, 4]
    assert visible_keys(request, 0, kind="causal", window=3) == [2, 3, 4]
    assert visible_keys(request, 1, kind="causal", window=3) == [3, 4, 5]
    assert visible_keys(request, 1, kind="causal", window=1) == [5]


def test_bidirectional_window_is_a_radius() -> None:
    request = OracleRequest(slots=range(6), num_queries=6)
    assert visible_keys(request, 2, kind="bidirectional", window=None) == [0, 1, 2, 3, 4, 5]
    assert visible_keys(request, 2, kind="encoder_only", window=2) == [1, 2, 3]
    assert visible_keys(request, 5, kind="bidirectional", window=1) == [5]


def test_tree_mask_uses_columns_and_the_window_uses_positions() -> None:
    """Three draft tokens after 3 cached ones; the last two are siblings at position 4."""
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 1]], dtype=torch.bool)
    request = OracleRequest(slots=range(6), num_queries=3, positions=[3, 4, 4], mask=mask)
    assert visible_keys(request, 2, kind="causal", window=None) == [0, 1, 2, 3, 5]
    assert visible_keys(request, 2, kind="causal", window=3) == [2, 3, 5]
    assert visible_keys(request, 1, kind="causal", window=2) == [3, 4]


def test_heads_of_a_group_share_a_kv_head() -> None:
    """Four query heads, two KV heads with a single key each: heads 0, 1 return the first, 2, 3 the second."""
    values = torch.tensor([[[1.0], [2.0]]])
    out, _ = attend(
        torch.ones(1, 4, 1), torch.ones(1, 2, 1), values, [OracleRequest(slots=[0], num_queries=1)], scale=1.0
    )
    assert out.flatten().tolist() == [1.0, 1.0, 2.0, 2.0]


def test_requests_follow_one_another_and_padding_is_zero() -> None:
    requests = [
        OracleRequest(slots=[0], num_queries=1),
        OracleRequest(slots=[1, 0], num_queries=0),
        OracleRequest(slots=[1], num_queries=1),
        OracleRequest(slots=[2], num_queries=1, is_padding=True),
    ]
    out, lse = attend(
        column(1, 1, 1, 1), column(0.0, LN2, math.nan), column(3.0, 5.0, math.nan), requests, scale=1.0
    )
    assert out.flatten().tolist() == [3.0, 5.0, 0.0, 0.0]
    assert lse.flatten().tolist() == [0.0, pytest.approx(LN2), -math.inf, -math.inf]


@pytest.mark.parametrize("seed", range(12))
def test_agrees_with_sdpa(seed: int) -> None:
    """Random ragged batches, window and GQA, against SDPA in float64 with an explicit mask built here."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    q_heads, kv_heads = rng.choice([(4, 4), (4, 2), (6, 1)])
    size, v_size, window = rng.choice([4, 16]), rng.choice([4, 8]), rng.choice([None, 1, 3, 7])
    kind, scale = rng.choice(["causal", "bidirectional"]), rng.choice([0.3, 1.0])
    lengths = [(rng.randint(0, 9), rng.randint(0, 5)) for _ in range(3)]
    total = sum(p + e for p, e in lengths)
    keys, values = (
        torch.randn(total, kv_heads, size, generator=generator),
        torch.randn(total, kv_heads, v_size, generator=generator),
    )
    slots = torch.randperm(total, generator=generator).tolist()
    requests, wanted, start = [], [], 0
    query = torch.randn(sum(e for _, e in lengths), q_heads, size, generator=generator).double()
    row = 0
    for prefix, extend in lengths:
        own = slots[start : start + prefix + extend]
        start += prefix + extend
        requests.append(OracleRequest(slots=own, num_queries=extend))
        p = torch.arange(prefix, prefix + extend)[:, None]
        k = torch.arange(prefix + extend)[None, :]
        seen = (k <= p) if kind == "causal" else torch.ones(extend, prefix + extend, dtype=torch.bool)
        if window is not None:
            seen = seen & ((p - k).abs() < window)
        q, key, value = (
            x.double().transpose(0, 1)
            for x in (query[row : row + extend], keys[own].double(), values[own].double())
        )
        row += extend
        repeat = q_heads // kv_heads
        wanted.append(
            scaled_dot_product_attention(
                q,
                key.repeat_interleave(repeat, 0),
                value.repeat_interleave(repeat, 0),
                attn_mask=seen,
                scale=scale,
            ).transpose(0, 1)
        )
    out, lse = attend(query, keys, values, requests, scale=scale, kind=kind, window=window)
    assert relative_error(out, torch.cat(wanted)) < 1e-12
    assert lse.shape == (query.shape[0], q_heads)
    assert torch.isfinite(lse).all()


def test_lse_merges_disjoint_key_sets() -> None:
    """Attention over two halves, weighted by exp(lse), is attention over the whole."""
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(n, 2, 8, generator=generator) for n in (1, 9, 9))
    parts = [
        attend(
            q, keys, values, [OracleRequest(slots=s, num_queries=1)], scale=0.5, logit_cap=2.0, kind="cross"
        )
        for s in (range(4), range(4, 9), range(9))
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * torch.exp(part - lse)[..., None] for out, part in parts[:2])
    assert relative_error(lse, parts[2][1]) < 1e-13
    assert relative_error(merged, parts[2][0]) < 1e-13


def test_read_slots_reads_the_raw_row() -> None:
    table = torch.tensor([[5, 3, 4], [9, 8, 0]], dtype=torch.int32)
    assert read_slots(table, 1, 2) == [9, 8]
    with pytest.raises(ValueError, match="width 3"):
        read_slots(table, 0, 4)


def test_stored_values_round_saturate_and_scale_once() -> None:
    x = torch.tensor([1.0, 1.06, 1000.0, -1e6])[:, None, None].expand(4, 2, 1)
    read = stored_values(x, torch.float8_e4m3fn, (1.0, 2.0))
    assert read[:, 0, 0].tolist() == [1.0, 1.0, 448.0, -448.0]
    assert read[:, 1, 0].tolist() == [1.0, 1.0, 896.0, -896.0]
    assert stored_values(x, torch.float8_e4m3fnuz)[3, 0, 0] == -240.0
    assert stored_values(x, torch.bfloat16)[1, 0, 0] == float(torch.tensor(1.06).bfloat16())
    assert torch.equal(stored_values(x, torch.float32), x.double())


def test_relative_error() -> None:
    expected = torch.tensor([4.0, -2.0, -math.inf])
    assert relative_error(torch.tensor([4.0, -1.0, -math.inf]), expected) == 0.25
    assert relative_error(torch.tensor([4.0, math.nan, -math.inf]), expected) == math.inf
    assert relative_error(torch.tensor([4.0, -2.0, 0.0]), expected) == math.inf
    assert relative_error(torch.tensor([0.5]), torch.tensor([0.0])) == 0.5
    assert relative_error(torch.empty(0, 3), torch.empty(0, 3)) == 0.0
    with pytest.raises(ValueError, match="shapes"):
        relative_error(torch.zeros(2), torch.zeros(2, 1))


def test_refuses_what_has_no_meaning() -> None:
    request = OracleRequest(slots=[0], num_queries=1)
    with pytest.raises(ValueError, match="kinds are"):
        attend(column(1.0), column(1.0), column(1.0), [request], scale=1.0, kind="casual")
    with pytest.raises(ValueError, match="window"):
        attend(column(1.0), column(1.0), column(1.0), [request], scale=1.0, kind="cross", window=4)
    with pytest.raises(ValueError, match="share the KV heads"):
        attend(torch.ones(1, 3, 1), torch.ones(1, 2, 1), torch.ones(1, 2, 1), [request], scale=1.0)
