"""The latent kernels and their adapter in the interpreter, judged by definition; bits that stay the same."""

import random
from typing import Any

import pytest
import torch

import anyattn
from anyattn.core.mla import MLAMethod, MLAPolicy
from anyattn.core.mla_layer import MLAProjections
from anyattn.kernels.triton.launch import set_hook
from anyattn.testing.mla_cases import MLACase, MLASpace, random_mla_case
from anyattn.testing.mla_interpreter import offer_triton_mla
from anyattn.testing.mla_judge import MLAReport, check_mla_case

offer_triton_mla()

SPACE = MLASpace(
    windows=(None,),
    sinks=(False,),
    kv_sources=("write", "write", "cached"),
    sizes=((64, 16, 16, 16), (32, 16, 48, 16)),
    max_requests=3,
    max_context=40,
    max_extend=12,
)


def judged(case: MLACase) -> MLAReport:
    report = check_mla_case(case, backend="triton")
    assert report.passed, str(report)
    return report


@pytest.mark.parametrize("seed", range(24))
def test_random_steps(seed: int) -> None:
    judged(random_mla_case(random.Random(f"triton-mla/{seed}"), SPACE))


@pytest.mark.parametrize("mode", ["decode", "extend", "verify"])
def test_half_precision_and_scaled_storage(mode: str) -> None:
    """A scale on float32 storage stands in for fp8, which the interpreter computes wrongly."""
    lens: dict[str, Any] = {"prefix_lens": (33, 5), "extend_lens": (1, 1) if mode == "decode" else (3, 2)}
    judged(MLACase(mode=mode, dtype="bfloat16", kv_dtype="bfloat16", num_q_heads=3, **lens))
    report = judged(MLACase(mode=mode, kv_dtype="float32", kv_scale=0.25, num_q_heads=3, **lens))
    assert report.method is MLAMethod.ABSORBED


@pytest.mark.parametrize("heads", [16, 20, 40, 128])
def test_head_blocks(heads: int) -> None:
    """More heads than a block, and numbers that don't fill one."""
    judged(MLACase(mode="decode", prefix_lens=(40, 3), extend_lens=(1, 1), num_q_heads=heads))
    judged(MLACase(prefix_lens=(21, 0), extend_lens=(5, 2), num_q_heads=heads, method="absorbed"))


@pytest.mark.parametrize("mask", [None, "tree"])
def test_long_verifications_are_split_and_merged(mask: str | None) -> None:
    seen: list[str] = []
    previous = set_hook(lambda kernel, grid, args, constexprs, options: bool(seen.append(kernel.__name__)))
    try:
        judged(MLACase(mode="verify", prefix_lens=(150,), extend_lens=(4,), num_q_heads=3, mask=mask))
    finally:
        set_hook(previous)
    assert {"mla_extend_kernel", "merge_kernel"} <= set(seen)


def test_long_decodes_are_split_and_merged() -> None:
    seen: list[str] = []
    previous = set_hook(lambda kernel, grid, args, constexprs, options: bool(seen.append(kernel.__name__)))
    try:
        judged(MLACase(mode="decode", prefix_lens=(150, 2), extend_lens=(1, 1), page_size=4))
        judged(MLACase(prefix_lens=(150,), extend_lens=(2,), method="absorbed"))
        judged(MLACase(prefix_lens=(9,), extend_lens=(4,), method="materialised", chunk_tokens=4))
    finally:
        set_hook(previous)
    decode = {"mla_decode_kernel", "merge_ranges_kernel"}
    wanted = {*decode, "mla_extend_kernel", "extend_kernel", "kv_write_kernel"}
    assert wanted <= set(seen)


@pytest.mark.parametrize("heads", [3, 20])
@pytest.mark.parametrize("lens", [(15, 0, 31, 16), (0, 0, 0, 95), (63, 1, 14, 33)])
def test_ranges_hold_pieces_of_several_requests(lens: tuple[int, ...], heads: int) -> None:
    """Tiles have 16 tokens: lengths at their edges, and one that four units share."""
    judged(MLACase(mode="decode", prefix_lens=lens, extend_lens=(1,) * 4, num_q_heads=heads, page_size=4))


def test_a_layer_with_fewer_heads_than_planned() -> None:
    """Two layers of one group: the workspace of the larger doesn't fit the smaller."""
    small, large = (MLACase(num_q_heads=n).spec() for n in (2, 4))
    decision = anyattn.select([large, small], dtype="float32", device="cpu", backend="triton")
    pool = anyattn.kv.create_pool(decision, num_slots=128 * decision.kv.page_size)
    table = anyattn.kv.RequestTable(max_requests=1, max_context=100)
    table.req_to_token[0] = torch.arange(pool.page_size, pool.page_size + 100)
    backend = anyattn.create_backend(decision, pool, table)
    batch = anyattn.ForwardBatch.decode([0], [100], [pool.page_size + 99])
    plan = backend.init_forward_metadata(batch)
    pool.write(1, torch.arange(pool.page_size, pool.page_size + 100), torch.randn(100, 1, 80))
    with anyattn.forward_context(backend, plan):
        out = anyattn.AttentionLayer(small, 1)(torch.randn(1, 2, 80), torch.randn(1, 1, 80), None, batch)
    assert isinstance(out, torch.Tensor)
    assert bool(out.isfinite().all())


def test_batch_invariant_steps_take_one_tile_and_no_splits() -> None:
    """Whatever the batch: numpy would hide another tile's bits, a GPU doesn't."""
    spec = MLACase(num_q_heads=3).spec()
    decision = anyattn.select(
        [spec], dtype="float32", device="cpu", backend="triton", deterministic="batch-invariant"
    )
    pool = anyattn.kv.create_pool(decision, num_slots=64 * decision.kv.page_size)
    table = anyattn.kv.RequestTable(max_requests=1, max_context=60)
    table.req_to_token[0] = torch.arange(pool.page_size, pool.page_size + 60)
    backend = anyattn.create_backend(decision, pool, table)
    slots = list(range(pool.page_size, pool.page_size + 60))
    batches = [
        anyattn.ForwardBatch.decode([0], [60], slots[-1:]),
        anyattn.ForwardBatch.extend([0], [58], [2], slots[-2:]),
        anyattn.ForwardBatch.extend([0], [0], [60], slots),
    ]
    steps = [backend.init_forward_metadata(batch).private for batch in batches]
    assert len({tuple(step.tiles.values()) for step in steps}) == 1
    assert not any(step.splits for step in steps)


def served(prefix: list[int], extend: list[int], mode: str, offset: int = 0) -> torch.Tensor:
    """Rows of one batch-invariant step; request i, token p always has the same latent and query."""
    spec = MLACase(num_q_heads=3).spec()
    decision = anyattn.select(
        [spec], dtype="float32", device="cpu", backend="triton", page_size=4, deterministic="batch-invariant"
    )
    pool = anyattn.kv.create_pool(decision, num_slots=400)
    table = anyattn.kv.RequestTable(max_requests=4, max_context=64)
    backend = anyattn.create_backend(decision, pool, table, mla=MLAPolicy(chunk_tokens=4))
    generator = torch.Generator().manual_seed(5)
    latents, queries = (torch.randn(4, 64, n, 80, generator=generator) for n in (1, 3))
    new, slots = [], []
    for i, (p, e) in enumerate(zip(prefix, extend, strict=True)):
        at = torch.arange(64) + 4 + i * 64
        table.req_to_token[i] = at
        pool.write(0, at[:p], latents[i + offset, :p])
        new.append((latents[i + offset, p : p + e], queries[i + offset, p : p + e]))
        slots += at[p : p + e].tolist()
    rows = list(range(len(prefix)))
    if mode == "decode":
        batch = anyattn.ForwardBatch.decode(rows, [p + 1 for p in prefix], slots)
    else:
        batch = anyattn.ForwardBatch.extend(rows, prefix, extend, slots)
    layer = anyattn.AttentionLayer(
        spec, 0, mla_expand=MLAProjections(torch.ones(3, 16, 64), torch.ones(3, 16, 64))
    )
    plan = backend.init_forward_metadata(batch)
    assert plan.mla_method is MLAMethod.ABSORBED
    with anyattn.forward_context(backend, plan):
        out = layer(torch.cat([q for _, q in new]), torch.cat([k for k, _ in new]), None, batch)
    assert isinstance(out, torch.Tensor)
    return out


def test_batch_invariant_bits() -> None:
    """Alone, batched, in one chunk or several, as decode: a token's bits are the same."""
    whole = served([0, 0, 0], [40, 7, 21], "extend")
    alone = served([0], [7], "extend", offset=1)
    assert torch.equal(whole[40:47], alone)
    assert torch.equal(served([16], [24], "extend"), whole[16:40])
    tail = served([30, 6, 20], [1, 1, 1], "decode")
    assert torch.equal(tail, torch.stack((whole[30], whole[46], whole[67])))
