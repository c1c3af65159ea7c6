"""`ascend` for latent layers, on a torch_npu that attends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from npu_stand import Calls, standing
from npu_steps import LATENT, LENGTHS, MODES, world

import anyattn
from anyattn.core.kv.pools.mla_split import SplitMLAPool
from anyattn.core.mla import MLAMethod, MLAPolicy
from anyattn.errors import FeatureError, PoolError, SelectionError

V2 = "npu_fused_infer_attention_score_v2"
BF16 = torch.bfloat16


@pytest.fixture
def calls() -> Iterator[Calls]:
    with standing() as found:
        yield found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["SPLIT", "NZ"])
def test_numbers(calls: Calls, layout: str, mode: str) -> None:
    made = world(LATENT, "ascend:910c", BF16, layout=layout)
    (out, lse), plan = made.attend(mode, return_lse=True)
    other = world(LATENT, "cpu:avx2", BF16, backend="torch_native", layout="NHD")
    expands = plan.mla_method.expands
    assert expands is (mode in ("extend", "mixed", "fresh"))
    other.backend.mla.policy = MLAPolicy(method=MLAMethod.MATERIALISED if expands else MLAMethod.ABSORBED)
    (theirs, their_lse), _ = other.attend(mode, return_lse=True)
    assert float((out - theirs).abs().max() / theirs.abs().max()) < 2e-2
    assert float((lse - their_lse).abs().max() / their_lse.abs().max()) < 1e-2
    assert {name for name, _ in calls.seen} == {V2}


def test_absorbed_calls_take_latents_and_ropes_apart(calls: Calls) -> None:
    made = world(LATENT, "ascend:910c", BF16)
    made.attend("verify")
    given = calls.last(V2)
    latents, ropes = made.pool.parts(0)
    assert given["key"] is given["value"]
    assert given["key"].data_ptr() == latents.data_ptr()
    assert given["key_rope"].data_ptr() == ropes.data_ptr()
    assert (given["query"].shape, given["query_rope"].shape) == ((20, 8, 512), (20, 8, 64))
    assert (given["input_layout"], given["num_key_value_heads"], given["sparse_mode"]) == ("TND", 1, 3)
    assert given["actual_seq_qlen"] == [4, 8, 12, 16, 20]
    prefix, _ = LENGTHS["verify"]
    assert given["actual_seq_kvlen"] == [p + 4 for p in prefix]


def test_one_token_takes_no_mask(calls: Calls) -> None:
    world(LATENT, "ascend:910b", BF16).attend("decode")
    given = calls.last(V2)
    assert (given["sparse_mode"], given["atten_mask"]) == (0, None)


def test_prefixes_in_chunks_leave_requests_without_keys_alone(calls: Calls) -> None:
    """Chunks of 200 tokens: most requests have no key in most of them."""
    made = world(LATENT, "ascend:910b", BF16)
    whole, _ = made.attend("extend")
    made.backend.mla.policy = MLAPolicy(chunk_tokens=200)
    calls.seen.clear()
    parts, _ = made.attend("extend")
    assert len(calls.seen) == 1 + 3  # new tokens, and 483 cached ones
    assert isinstance(whole, torch.Tensor)
    assert float((whole - parts).abs().max() / whole.abs().max()) < 1e-2
    assert all(given["block_table"] is None for _, given in calls.seen)
    new, first = calls.seen[0][1], calls.seen[1][1]
    assert (new["sparse_mode"], first["sparse_mode"]) == (3, 0)
    assert first["actual_seq_kvlen"] == [0, 128, 128, 200, 200]  # the third request has no new token


def test_long_drafts_are_refused(calls: Calls) -> None:
    made = world(LATENT, "ascend:910b", BF16, drafts=32)
    made.batch("verify")
    batch = anyattn.ForwardBatch.verify([0], [1], [17], made.slots[0][1:18])
    with pytest.raises(FeatureError, match="<= 16"):
        made.backend.init_forward_metadata(batch)
    assert calls.seen == []


def test_head_counts_beyond_the_operator_are_refused() -> None:
    with pytest.raises(SelectionError, match=r"q_heads|query heads"):
        world(replace(LATENT, num_q_heads=24), "ascend:910b", BF16)


@pytest.mark.parametrize("layout", ["SPLIT", "NZ"])
def test_split_pools_store_move_and_read_back(layout: str) -> None:
    pool = SplitMLAPool(
        [LATENT, replace(LATENT, kv_shared_with=0)],
        num_slots=64,
        page_size=16,
        layout=layout,
        kv_dtype=BF16,
        dtype=BF16,
    )
    rows, loc = torch.randn(5, 1, 576).to(BF16), torch.tensor([16, 40, 17, 70, 33])
    pool.write(0, loc, rows)
    pool.write(1, loc, rows + 1)  # shares layer 0's storage: stores nothing
    for layer in (0, 1):
        k, v = pool.gather(layer, loc)
        assert torch.equal(k, rows)
        assert torch.equal(v, rows[..., :512])
    pool.move(loc[:2], torch.tensor([20, 21]))
    assert torch.equal(pool.gather(0, torch.tensor([20, 21]))[0], rows[:2])
    shapes = (
        [(5, 16, 1, 512), (5, 16, 1, 64)] if layout == "SPLIT" else [(5, 16, 1, 32, 16), (5, 16, 1, 4, 16)]
    )
    assert [c.shape for c in pool.caches(0)] == shapes
    assert pool.nbytes() == 80 * 576 * 2
    assert not pool.gather(0, torch.tensor([18]))[0].any()


def test_split_pools_say_what_they_are_not() -> None:
    sizes = {"num_slots": 64, "page_size": 16, "dtype": BF16}
    with pytest.raises(PoolError, match="SPLIT or NZ"):
        SplitMLAPool([LATENT], layout="NHD", kv_dtype=BF16, **sizes)  # type: ignore[arg-type]
    with pytest.raises(PoolError, match="in two parts"):
        SplitMLAPool([LATENT], kv_dtype=torch.float8_e4m3fn, **sizes)  # type: ignore[arg-type]
    with pytest.raises(PoolError, match="parts"):
        SplitMLAPool([LATENT], kv_dtype=BF16, **sizes).latent_cache(0)  # type: ignore[arg-type]
