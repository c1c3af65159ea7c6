"""`torch_native` over steps that follow, cross and share each other, each judged by the oracle."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import anyattn
from anyattn.testing import oracle
from anyattn.testing.builder import Step, build_step
from anyattn.testing.cases import Case
from anyattn.testing.judge import expected, judge, run_step
from anyattn.testing.world import World

SERVED = Case(
    prefix_lens=(12, 5, 33, 0),
    extend_lens=(6, 1, 4, 9),
    page_size=4,
    slot_layout="shuffled_pages",
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    v_head_dim=8,
    window=11,
    seed=5,
)


def passed(step: Step) -> None:
    report = judge(step)
    assert report.passed, str(report)


def test_two_plans_alive_at_once() -> None:
    """Both planned before either runs, run in turns, each right every time."""
    world = World(SERVED)
    first, second = build_step(world, [0, 2]), build_step(world, [3, 1])
    first.keys, first.values = world.keys.clone(), world.values.clone()
    plans = [world.backend.init_forward_metadata(step.batch) for step in (first, second)]
    for turn in (0, 1, 1, 0, 1):
        step = (first, second)[turn]
        passed(run_step(step, plans[turn]))


def test_planning_leaves_older_plans_alone() -> None:
    world = World(SERVED)
    plan = world.backend.init_forward_metadata(build_step(world, [0, 2]).batch)
    (table,) = plan.tables.values()
    before = [x.clone() for x in (*table.csr, plan.positions, plan.seq_lens, plan.query_offsets)]
    world.backend.init_forward_metadata(build_step(world, [3, 1, 2]).batch)
    after = (*table.csr, plan.positions, plan.seq_lens, plan.query_offsets)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_replanning_after_a_request_left() -> None:
    """Request 1 leaves; a newcomer takes its row and slots; the others are reordered and decode on."""
    world = World(SERVED, spare=3)
    passed(run_step(build_step(world)))
    lens = list(SERVED.seq_lens)
    members = [2, 0, 3]
    decode = build_step(world, members, [lens[m] for m in members], [1] * 3, mode="decode", fill_prefix=False)
    passed(run_step(decode))
    newcomer = build_step(world, [1], [0], [7], mode="extend", fill_prefix=False)
    passed(run_step(newcomer))
    lens = [lens[0] + 1, 7, lens[2] + 1, lens[3] + 1]
    members = [3, 1, 0, 2]
    for _ in range(2):
        step = build_step(
            world, members, [lens[m] for m in members], [1] * 4, mode="decode", fill_prefix=False
        )
        passed(run_step(step))
        lens = [n + 1 for n in lens[:1]] + [lens[1] + 1] + [n + 1 for n in lens[2:]]
    assert lens[1] == 9


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 16])
@pytest.mark.parametrize("window", [None, 6])
def test_chunked_is_whole(chunk: int, window: int | None) -> None:
    """Any chunk size gives the rows of one whole prefill."""
    case = replace(SERVED, prefix_lens=(0,), extend_lens=(21,), window=window, return_lse=False)
    world = World(case)
    whole = run_step(build_step(world))
    rows = []
    world = World(case)
    for start in range(0, 21, chunk):
        count = min(chunk, 21 - start)
        part = slice(start, start + count)
        inputs = (whole.q[part], whole.k[part], whole.v[part])
        step = build_step(world, [0], [start], [count], fill_prefix=False, inputs=inputs)
        passed(run_step(step))
        rows.append(step.out)
    assert oracle.relative_error(torch.cat(rows), whole.out) < 1e-6


def test_requests_may_share_a_prefix() -> None:
    """Two rows list the same slots for their first 8 tokens; each adds its own."""
    case = replace(SERVED, prefix_lens=(12, 8, 8), extend_lens=(2, 5, 1))
    world = World(case)
    for member in (1, 2):
        world.slots[member] = torch.cat([world.slots[0][:8], world.slots[member][8:]])
        row = world.slots[member].int()
        world.table.req_to_token[world.rows[member], : row.numel()] = row
    passed(run_step(build_step(world)))


def test_mixed_is_its_parts() -> None:
    """A mixed batch gives what an extend and a decode of the same requests give."""
    case = replace(SERVED, mode="mixed", prefix_lens=(12, 0, 33, 8), extend_lens=(6, 9, 1, 1), num_decode=2)
    world = World(case)
    mixed = run_step(build_step(world))
    passed(mixed)
    for members, rows, mode in (([0, 1], slice(0, 15), "extend"), ([2, 3], slice(15, 17), "decode")):
        inputs = (mixed.q[rows], mixed.k[rows], mixed.v[rows])
        step = run_step(build_step(world, members, mode=mode, fill_prefix=False, inputs=inputs))
        passed(step)
        assert oracle.relative_error(step.out, mixed.out[rows]) < 1e-6


def test_alone_is_batched() -> None:
    world = World(SERVED)
    batched = run_step(build_step(world))
    row = 0
    for member, count in enumerate(SERVED.extend_lens):
        rows = slice(row, row + count)
        inputs = (batched.q[rows], batched.k[rows], batched.v[rows])
        alone = run_step(build_step(world, [member], fill_prefix=False, inputs=inputs))
        assert oracle.relative_error(alone.out, batched.out[rows]) < 1e-6
        row += count


def test_tree_is_its_chains() -> None:
    """Each branch of a tree mask equals a plain causal chain over the same tokens.

    Tokens a-b, a-c: row b of the tree is row b of the chain (a, b); row c that of the chain (a, c).
    """
    case = Case(mode="verify", prefix_lens=(7,), extend_lens=(3,), num_q_heads=2, window=5, seed=3)
    world = World(case)
    tree = build_step(world)
    mask = torch.ones(3, 10, dtype=torch.bool)
    mask[0, 8:] = mask[1, 9] = mask[2, 8] = False
    slots = world.slots[0]
    tree.batch = anyattn.ForwardBatch.verify(
        world.rows,
        [7],
        [3],
        slots[7:].tolist(),
        mask=anyattn.ExplicitMask.from_matrices([mask]),
        positions=[7, 8, 8],
    )
    run_step(tree)
    for leaf in (1, 2):
        picked = [0, leaf]
        chain = build_step(
            World(case),
            [0],
            [7],
            [2],
            fill_prefix=True,
            inputs=(tree.q[picked], tree.k[picked], tree.v[picked]),
        )
        run_step(chain)
        assert oracle.relative_error(tree.out[picked], chain.out) < 1e-6
        assert oracle.relative_error(tree.lse[picked], chain.lse) < 1e-6


def test_encoder_kv_is_written_once_and_read_ever_after() -> None:
    """The first step stores the encoder's KV; decode steps pass none."""
    case = Case(
        kind="cross",
        prefix_lens=(0, 0, 0),
        extend_lens=(4, 1, 2),
        encoder_lens=(9, 0, 17),
        page_size=4,
        slot_layout="interleaved",
        num_q_heads=2,
    )
    world = World(case, spare=3)
    passed(run_step(build_step(world)))
    lens = list(case.seq_lens)
    for _ in range(3):
        prefix = [lens[2], lens[0]]
        passed(
            run_step(build_step(world, [2, 0], prefix, [1, 1], mode="decode", kv="cached", fill_prefix=False))
        )
        lens = [lens[0] + 1, lens[1], lens[2] + 1]


# -- several layers on one plan ------------------------------------------------------------------------


def test_layers_of_different_kinds_share_a_step() -> None:
    """Full, windowed, capped, sink and bidirectional layers, other head counts, one shared KV: one plan."""
    common = {"num_kv_heads": 2, "head_dim": 16}
    specs = [
        anyattn.AttentionSpec(num_q_heads=4, **common),
        anyattn.AttentionSpec(num_q_heads=4, sliding_window=5, **common),
        anyattn.AttentionSpec(num_q_heads=2, logit_cap=3.0, **common),
        anyattn.AttentionSpec(num_q_heads=6, sinks=True, sliding_window=3, **common),
        anyattn.AttentionSpec(num_q_heads=4, kind=anyattn.AttentionKind.BIDIRECTIONAL, **common),
        anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=8, v_head_dim=24),
        anyattn.AttentionSpec(num_q_heads=8, kv_shared_with=0, **common),
    ]
    decision = anyattn.select(specs, dtype=torch.float32, device="cpu", page_size=2, backend="torch_native")
    pool = anyattn.kv.create_pool(decision, num_slots=64)
    table = anyattn.kv.RequestTable(max_requests=4, max_context=32, device="cpu")
    backend = anyattn.create_backend(decision, pool, table)
    sinks = torch.randn(6)
    layers = [anyattn.AttentionLayer(s, i, sinks=sinks if s.sinks else None) for i, s in enumerate(specs)]
    slots = torch.randperm(30)[:19] + 2
    table.req_to_token[2, :19] = slots
    shapes = [(s.num_kv_heads, s.head_dim, s.v_head_dim) for s in specs]
    keys = [torch.randn(64 + 2, h, d) for h, d, _ in shapes]
    values = [torch.randn(64 + 2, h, d) for h, _, d in shapes]
    keys[6], values[6] = keys[0], values[0]
    for i, layer in enumerate(layers):
        if layer.spec.kv_shared_with is None:
            pool.write(i, slots[:13], keys[i][slots[:13]], values[i][slots[:13]])
    batch = anyattn.ForwardBatch.extend([2], [13], [6], slots[13:])
    plan = backend.init_forward_metadata(batch)
    for i, (spec, layer) in enumerate(zip(specs, layers, strict=True)):
        q = torch.randn(6, spec.num_q_heads, spec.head_dim)
        new = slots[13:]
        k, v = (None, None) if spec.kv_shared_with is not None else (keys[i][new], values[i][new])
        with anyattn.forward_context(backend, plan):
            out, lse = layer(q, k, v, batch, return_lse=True)
        want_out, want_lse = oracle.attend(
            q,
            keys[i],
            values[i],
            [oracle.OracleRequest(slots=oracle.read_slots(table.req_to_token, 2, 19), num_queries=6)],
            scale=spec.scale,
            kind=spec.kind.value,
            window=spec.sliding_window,
            logit_cap=spec.logit_cap,
            sinks=sinks if spec.sinks else None,
        )
        assert oracle.relative_error(out, want_out) < 1e-5, spec
        assert oracle.relative_error(lse, want_lse, floor=1.0) < 1e-5, spec


def test_idle_runs_nothing() -> None:
    world = World(SERVED)
    batch = anyattn.ForwardBatch.idle()
    plan = world.backend.init_forward_metadata(batch)
    before = world.pool.key_cache(0).clone()
    with anyattn.forward_context(world.backend, plan):
        out, lse = world.layer(
            torch.empty(0, 4, 16), torch.empty(0, 2, 16), torch.empty(0, 2, 8), batch, return_lse=True
        )
        flat = world.layer(torch.empty(0, 64), None, None, batch)
    assert out.shape == (0, 4, 8)
    assert lse.shape == (0, 4)
    assert flat.shape == (0, 32)
    assert torch.equal(world.pool.key_cache(0).nan_to_num(7), before.nan_to_num(7))


def test_half_model_with_fp8_cache_gives_half_output() -> None:
    case = Case(dtype="bfloat16", kv_dtype="float8_e4m3fn", prefix_lens=(3,), extend_lens=(2,))
    assert run_step(build_step(World(case))).out.dtype is torch.bfloat16


def test_expected_is_independent_of_the_run() -> None:
    """The oracle's answer is the same before and after: it reads nothing that the backend writes."""
    world = World(SERVED)
    step = build_step(world)
    before = expected(step)
    run_step(step)
    after = expected(step)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_order_of_requests_does_not_matter() -> None:
    world = World(SERVED)
    batched = run_step(build_step(world))
    offsets = [0, 6, 7, 11, 20]
    order = [2, 0, 3, 1]
    random.Random(0).shuffle(order)
    rows = torch.cat([torch.arange(offsets[m], offsets[m + 1]) for m in order])
    inputs = (batched.q[rows], batched.k[rows], batched.v[rows])
    again = run_step(build_step(world, order, fill_prefix=False, inputs=inputs))
    assert oracle.relative_error(again.out, batched.out[rows]) < 1e-6
