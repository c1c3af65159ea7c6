"""TARGET_VERIFY against the oracle: chains and trees, both mask forms, ragged drafts."""

from __future__ import annotations

import random

import pytest
import torch
from spec_worlds import VerifyWorld, random_tree

import anyattn
from anyattn.core.metadata.masks import expand_tree_mask, fill_mask_offsets
from anyattn.core.speculative.compact import moves
from anyattn.core.speculative.ragged import RaggedTrees
from anyattn.core.speculative.tree import Tree
from anyattn.core.speculative.verify_mask import ancestors, fill_tree_mask, tree_mask_numel
from anyattn.errors import AnyattnError, BatchError, ConfigError, FeatureError
from anyattn.testing import oracle

FULL, QLEN = anyattn.TreeMaskMode.FULL_MASK, anyattn.TreeMaskMode.QLEN_ONLY


@pytest.mark.parametrize("seed", range(25))
def test_trees_in_every_form(seed: int) -> None:
    """Cells of the host, both buffers: the same numbers, and the oracle's."""
    w = VerifyWorld(seed)
    common = (w.world.rows, w.prefix, w.loc.tolist())
    outs = [w.run(w.trees.batch(*common))]
    for mode in (FULL, QLEN):
        outs.append(w.run(w.trees.batch(*common, mask=w.mask(mode))))
    assert oracle.relative_error(outs[0], w.expected()) < 1e-5
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("mode", [FULL, QLEN])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_drafter_fills_the_mask_after_planning_began(mode: anyattn.TreeMaskMode, ragged: bool) -> None:
    """From parents on the device, between the two halves of planning."""
    for seed in range(8):
        w = VerifyWorld(seed, uniform=not ragged)
        mask, backend = w.mask(mode), w.world.backend
        mask.buffer.fill_(True)
        batch = anyattn.ForwardBatch.verify(
            w.world.rows, w.prefix, w.trees.draft_lens, w.loc.tolist(),
            mask=mask, positions=w.trees.positions(w.prefix),
        )  # fmt: skip
        plan = backend.init_forward_metadata_out_graph(batch)
        widest = max(w.trees.draft_lens)
        parents = torch.tensor([[*t.parents, *[-1] * (widest - t.num_nodes)] for t in w.trees.trees])
        lens = torch.tensor(w.trees.draft_lens)
        fill_tree_mask(
            mask, parents, seq_lens=torch.tensor(w.prefix) + lens, draft_lens=lens if ragged else None
        )
        backend.init_forward_metadata_in_graph(plan)
        with anyattn.forward_context(backend, plan):
            out = w.world.layer(w.q, w.k, w.v, batch)
        assert oracle.relative_error(out, w.expected()) < 1e-5


def test_ancestors_by_squaring() -> None:
    rng = random.Random(0)
    for nodes in (1, 2, 3, 5, 8, 16, 17):
        trees = [random_tree(rng, nodes) for _ in range(5)] + [Tree.chain(nodes)]
        want = torch.stack([t.mask() for t in trees])
        assert torch.equal(ancestors(torch.tensor([t.parents for t in trees])), want)


@pytest.mark.parametrize("slack", [0, 37])
def test_spelling_out_gives_the_full_form(slack: int) -> None:
    """`slack`: the storage is only bounded; what lies behind the last request is False."""
    rng = random.Random(slack)
    for _ in range(20):
        trees = [random_tree(rng, rng.randint(1, 7)) for _ in range(rng.randint(1, 4))]
        prefix = [rng.randint(0, 9) for _ in trees]
        own = torch.cat([t.mask().flatten() for t in trees])
        full = torch.cat([t.full_mask(p).flatten() for t, p in zip(trees, prefix, strict=True)])
        ext = torch.tensor([t.num_nodes for t in trees], dtype=torch.int32)
        seq = ext + torch.tensor(prefix, dtype=torch.int32)
        offsets, out = torch.empty(len(trees) + 1, dtype=torch.int64), torch.ones(full.numel() + slack).bool()
        fill_mask_offsets(ext, seq, offsets)
        assert int(offsets[-1]) == full.numel()
        expand_tree_mask(own, ext, seq, offsets, out)
        assert torch.equal(out[: full.numel()], full)
        assert not out[full.numel() :].any()


def test_sizes_of_masks() -> None:
    assert tree_mask_numel(QLEN, 3, 4, 1000) == 3 * 4 * 4
    assert tree_mask_numel(FULL, 3, 4, 1000) == 3 * 4 * 1000
    mask = anyattn.VerifyMask.allocate(FULL, max_requests=2, draft_tokens=3, max_context=10)
    assert mask.buffer.numel() == 60
    assert mask.fits(2, 3, 10)
    assert not mask.fits(3) | mask.fits(1, 4) | mask.fits(1, 1, 11)
    assert anyattn.VerifyMask.allocate(QLEN, max_requests=2, draft_tokens=3).fits(2, 3, 10**6)
    cells = torch.zeros(59, dtype=torch.bool)
    for buffer, words in ((cells, "too small"), (cells.float(), "buffer of a verify mask")):
        with pytest.raises(ConfigError, match=words):
            anyattn.VerifyMask(buffer, FULL, 2, 3, 10)


def test_masks_that_do_not_fit_are_refused_before_a_kernel_runs() -> None:
    w = VerifyWorld(3)
    common = (w.world.rows, w.prefix, w.trees.draft_lens, w.loc.tolist())
    positions = w.trees.positions(w.prefix)
    widest, count = max(w.trees.draft_lens), len(w.trees.trees)
    for sizes in (
        {"max_requests": count - 1, "draft_tokens": 8},
        {"max_requests": count, "draft_tokens": widest - 1},
        {"max_requests": count, "draft_tokens": widest, "max_context": 2},
    ):
        mask = anyattn.VerifyMask.allocate(FULL if "max_context" in sizes else QLEN, **sizes)
        batch = anyattn.ForwardBatch.verify(*common, mask=mask, positions=positions)
        with pytest.raises(BatchError, match="the verify mask doesn't fit the step"):
            w.run(batch)
        with pytest.raises(BatchError, match="the verify mask doesn't fit these trees"):
            w.trees.write(mask, w.prefix)
    short = anyattn.ExplicitMask.from_matrices([t.mask()[:, :1] for t in w.trees.trees])
    with pytest.raises(BatchError, match="the explicit mask doesn't fit the lengths"):
        w.run(anyattn.ForwardBatch.verify(*common, mask=short, positions=positions))
    with pytest.raises(BatchError, match="doesn't fit these trees"):
        fill_tree_mask(w.mask(QLEN), torch.full((7, 2), -1))
    with pytest.raises(BatchError, match="parent of node 1 of request 0 isn't an earlier node"):
        fill_tree_mask(w.mask(QLEN), torch.tensor([[-1, 1]]))
    with pytest.raises(BatchError, match="FULL_MASK spells out the prefix"):
        fill_tree_mask(w.mask(FULL), torch.tensor([[-1, 0]]))


def test_a_tree_without_positions_is_refused() -> None:
    w = VerifyWorld(5)
    with pytest.raises(BatchError, match="a tree of draft tokens has positions of its own"):
        anyattn.ForwardBatch.verify(
            w.world.rows, w.prefix, w.trees.draft_lens, w.loc.tolist(), mask=w.mask(QLEN)
        )


def test_more_drafts_than_the_limits_allow_are_refused() -> None:
    w = VerifyWorld(0)
    assert w.world.decision.request.limits is not None
    most = w.world.decision.request.limits.max_draft_tokens
    slots = w.world.slots[0]
    for lens in ([most + 1], torch.tensor([most + 1])):
        batch = anyattn.ForwardBatch.verify([0], [0], lens, torch.arange(16, 17 + most))
        with pytest.raises(BatchError, match=r"Limits\.max_draft_tokens"):
            w.world.backend.init_forward_metadata(batch)
    assert slots.numel()


def test_undeclared_kinds_of_drafts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for feature, words in ((anyattn.Feature.TREE_VERIFY, "tree"), (anyattn.Feature.RAGGED_VERIFY, "ragged")):
        w = VerifyWorld(3)
        mode = anyattn.ForwardMode.TARGET_VERIFY
        left = w.world.backend._features[mode] - {feature}
        monkeypatch.setitem(w.world.backend._features, mode, left)
        assert len({*w.trees.draft_lens}) > 1
        with pytest.raises(FeatureError, match=words):
            w.run(w.trees.batch(w.world.rows, w.prefix, w.loc.tolist(), mask=w.mask(QLEN)))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 4])
def test_compaction_moves_accepted_nodes_to_their_places(layout: str, page: int) -> None:
    """The KV of the accepted path stands where a chain of the same tokens would have put it, bit for bit."""
    for seed in range(6):
        w = VerifyWorld(seed, uniform=True, layout=layout, page_size=page)
        w.run(w.trees.batch(w.world.rows, w.prefix, w.loc.tolist()))
        rng = random.Random(seed)
        nodes = w.trees.draft_lens[0]
        path, counts = torch.zeros(len(w.prefix), nodes, dtype=torch.int64), []
        for b, tree in enumerate(w.trees.trees):
            way = tree.path(rng.randrange(nodes))
            path[b, : len(way)] = torch.tensor(way)
            counts.append(len(way))
        pool = w.world.pool
        before = pool.gather(0, torch.arange(pool.total_slots))
        before = tuple(x.clone() for x in before)
        source, target = moves(
            w.world.table, torch.tensor(w.world.rows), torch.tensor(w.prefix), path, torch.tensor(counts)
        )
        pool.move(source, target)
        after = pool.gather(0, torch.arange(pool.total_slots))
        changed = set()
        for b, (slots, prefix) in enumerate(zip(w.world.slots, w.prefix, strict=True)):
            for t in range(counts[b]):
                a, z = int(slots[prefix + int(path[b, t])]), int(slots[prefix + t])
                changed.add(z)
                for was, now in zip(before, after, strict=True):
                    assert torch.equal(was[a], now[z])
        rest = [s for s in range(pool.page_size, pool.total_slots) if s not in changed]
        for was, now in zip(before, after, strict=True):
            assert torch.equal(was[rest].nan_to_num(7), now[rest].nan_to_num(7))


def test_a_batch_of_trees_lists_its_rows() -> None:
    trees = RaggedTrees((Tree.chain(2), Tree((-1, 0, 0))))
    assert trees.rows == [slice(0, 2), slice(2, 5)]
    assert trees.positions([5, 7]) == [5, 6, 7, 8, 8]
    assert not trees.is_chain
    chains = RaggedTrees((Tree.chain(2), Tree.chain(1)))
    batch = chains.batch([0, 1], [5, 7], [8, 9, 10])
    assert (batch.mask, batch.positions) == (None, None)


def test_traits_name_the_form_that_is_read() -> None:
    w = VerifyWorld(1)
    assert w.world.backend.traits(anyattn.ForwardMode.TARGET_VERIFY).tree_mask is QLEN
    assert w.world.backend.traits(anyattn.ForwardMode.TARGET_VERIFY).ragged_verify
    assert issubclass(BatchError, AnyattnError)


def test_window_pools_move_their_own_slots() -> None:
    """A dual pool: the window layer's KV is moved in its own pool's slots."""
    specs = [
        anyattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=8, sliding_window=w) for w in (None, 9)
    ]
    options = {"dtype": torch.float32, "device": "cpu", "backend": "torch_native", "page_size": 4}
    decision = anyattn.select(specs, **options)
    pool = anyattn.kv.create_pool(decision, num_slots=32, window_slots=16)
    allocator = anyattn.kv.WindowAllocator(pool)
    pages = allocator.allocate(2)
    allocator.cover(pages, 0, 8)
    slots = torch.tensor([p * 4 + i for p in pages for i in range(4)])
    for layer in (0, 1):
        slot_map = pool.slot_map(layer)
        own = slots if slot_map is None else slot_map[slots].long()
        k = torch.arange(8.0)[:, None, None].expand(8, 1, 8) + 10 * layer
        pool.write(layer, own, k, -k)
    pool.move(slots[[6, 7]], slots[[5, 6]])
    for layer in (0, 1):
        slot_map = pool.slot_map(layer)
        own = slots if slot_map is None else slot_map[slots].long()
        k, v = pool.gather(layer, own)
        assert (k[:, 0, 0] - 10 * layer).tolist() == [0, 1, 2, 3, 4, 6, 7, 7]
        assert torch.equal(k, -v)


def test_latents_are_moved_once() -> None:
    """V is a part of K: moving both would read what was just overwritten."""
    mla = anyattn.MLASpec(kv_lora_rank=8, qk_rope_head_dim=4)
    spec = anyattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=12, v_head_dim=8, mla=mla, scale=0.3)
    decision = anyattn.select(spec, dtype=torch.float32, device="cpu", backend="torch_native", page_size=4)
    pool = anyattn.kv.create_pool(decision, num_slots=16)
    k = torch.arange(8.0)[:, None, None].expand(8, 1, 12)
    pool.write(0, torch.arange(4, 12), k, k[..., :8])
    pool.move(torch.tensor([6, 7, 8]), torch.tensor([5, 6, 7]))
    got, _ = pool.gather(0, torch.arange(4, 12))
    assert got[:, 0].eq(got[:, 0, :1]).all()
    assert got[:, 0, 0].tolist() == [0, 2, 3, 4, 4, 5, 6, 7]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_nothing_waits_for_the_device() -> None:
    """Filling a mask, accepting, moving KV and drafting, with every synchronisation an error."""
    device = torch.device("cuda")
    mask = anyattn.VerifyMask.allocate(QLEN, max_requests=2, draft_tokens=4, device=device)
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]], device=device)
    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]], device=device)
    targets = torch.tensor([[3, 0, 9, 0], [2, 3, 9, 0]], device=device)
    spec = anyattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=16)
    decision = anyattn.select(spec, dtype=torch.float16, device="cuda", backend="torch_native", page_size=4)
    pool = anyattn.kv.create_pool(decision, num_slots=64)
    table = anyattn.kv.RequestTable(max_requests=2, max_context=16, device=device)
    table.req_to_token[:2] = torch.arange(4, 36, device=device, dtype=torch.int32).view(2, 16)
    rows, prefix = torch.tensor([0, 1], device=device), torch.tensor([3, 5], device=device)
    info = anyattn.speculative.DraftInfo(max_requests=2, top_k=2, max_steps=2, max_context=18, device=device)
    slots = torch.tensor([[40, 41], [42, 43]], device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fill_tree_mask(mask, parents)
        path, counts = anyattn.speculative.accept_on_device(parents, tokens, targets)
        pool.move(*moves(table, rows, prefix, path, counts))
        info.begin(table, rows, prefix)
        info.step(slots)
        info.step(slots + 8, slots % 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts.tolist() == [2, 3]
    assert path[:, :3].tolist() == [[0, 2, 0], [0, 1, 2]]
    assert torch.equal(mask.buffer.view(2, 4, 4).cpu(), ancestors(parents.cpu()))
