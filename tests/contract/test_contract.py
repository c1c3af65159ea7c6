"""The template of `forward`, plans, contexts, wrappers: with torch_native built by hand, no selection."""

import pytest
import torch

import anyattn
from anyattn.backends.reference.torch_native import TorchNative
from anyattn.core.capabilities import CapabilityRow, Feature, FormSpec, HeadDims, PageSizes, Phase
from anyattn.core.contract import BackendConfig
from anyattn.core.groups import GroupSet
from anyattn.core.kv import MHAPool
from anyattn.core.plan import TableForm, TableKind
from anyattn.core.traits import GraphSupport, HostLengthNeed, MixedSupport, SharedReadEnds, Traits
from anyattn.core.wrappers import HybridBackend
from anyattn.errors import ConfigError, ContextError, FeatureError, HostLengthError, PlanError, PoolError

SPEC = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8)
LIMITS = anyattn.Limits(max_requests=4, max_tokens=64, max_context=64)


def row(features: tuple[Feature, ...] = tuple(Feature)) -> CapabilityRow:
    return CapabilityRow(
        phases=tuple(Phase),
        architectures=("cpu:avx2",),
        head_dims=HeadDims(maximum=1024),
        dtypes=("float32",),
        kv_dtypes=("float32",),
        pages=PageSizes(multiple_of=1),
        form=FormSpec("token_csr", 1, index_dtype="int64"),
        features=features,
    )


def backend(
    specs: list[anyattn.AttentionSpec] | None = None,
    features: tuple[Feature, ...] = tuple(Feature),
    pool: MHAPool | None = None,
    table: anyattn.kv.RequestTable | None = None,
) -> TorchNative:
    specs = specs or [SPEC]
    pool = pool or MHAPool(specs, num_slots=64, page_size=4, kv_dtype=torch.float32, dtype=torch.float32)
    table = table or anyattn.kv.RequestTable(max_requests=4, max_context=64)
    config = BackendConfig(
        name="torch_native",
        groups=GroupSet.from_specs(specs),
        pool=pool,
        table=table,
        limits=LIMITS,
        form=TableForm(TableKind.TOKEN_CSR, index_dtype=torch.int64),
        row=row(features),
        dtype=torch.float32,
    )
    return TorchNative(config)


def qkv(tokens: int, spec: anyattn.AttentionSpec = SPEC) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(tokens, spec.num_q_heads, spec.head_dim),
        torch.randn(tokens, spec.num_kv_heads, spec.head_dim),
        torch.randn(tokens, spec.num_kv_heads, spec.v_head_dim),
    )


def prompt(made: TorchNative, row: int = 0, length: int = 6) -> anyattn.ForwardBatch:
    slots = torch.arange(4 + 16 * row, 4 + 16 * row + length)
    made.table.req_to_token[row, :length] = slots.int()
    return anyattn.ForwardBatch.extend([row], [0], [length], slots)


def test_output_has_the_rank_of_q_and_out_is_used() -> None:
    made, layer = backend(), anyattn.AttentionLayer(SPEC, 0)
    batch = prompt(made)
    plan = made.init_forward_metadata(batch)
    q, k, v = qkv(6)
    with anyattn.forward_context(made, plan):
        out3 = layer(q, k, v, batch)
        out2 = layer(q.flatten(1), k.flatten(1), v.flatten(1), batch)
        given = torch.full((6, 32), torch.nan)
        same = layer(q.flatten(1), k, v, batch, out=given)
    assert out3.shape == (6, 4, 8)
    assert out2.shape == (6, 32)
    assert same is given
    assert torch.equal(out3.flatten(1), out2)
    assert torch.equal(out2, given)


def test_idle_runs_nothing_and_has_the_right_shape() -> None:
    made, layer = backend(), anyattn.AttentionLayer(SPEC, 0)
    batch = anyattn.ForwardBatch.idle()
    plan = made.init_forward_metadata(batch)
    q, k, v = qkv(0)
    with anyattn.forward_context(made, plan):
        out, lse = layer(q.flatten(1), k, v, batch, return_lse=True)
    assert out.shape == (0, 32)
    assert lse.shape == (0, 4)


def test_no_context_and_foreign_plans_are_refused() -> None:
    made, other, layer = backend(), backend(), anyattn.AttentionLayer(SPEC, 0)
    batch, q = prompt(made), qkv(6)
    with pytest.raises(ContextError, match="forward_context"):
        layer(*q, batch)
    plan = made.init_forward_metadata(batch)
    twin = prompt(made)
    with anyattn.forward_context(made, plan), pytest.raises(PlanError, match="another batch"):
        layer(*q, twin)
    with anyattn.forward_context(other, plan), pytest.raises(PlanError, match="another backend"):
        layer(*q, batch)


def test_contexts_nest_and_restore() -> None:
    made = backend()
    outer = made.init_forward_metadata(prompt(made))
    inner = made.init_forward_metadata(prompt(made, row=1))
    with anyattn.forward_context(made, outer):
        with anyattn.forward_context(made, inner):
            assert anyattn.current_context().plan is inner
        assert anyattn.current_context().plan is outer
    with pytest.raises(ContextError):
        anyattn.current_context()


def test_wider_or_unknown_layers_are_refused() -> None:
    made = backend()
    wide = anyattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=8)
    capped = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, logit_cap=5.0)
    batch = prompt(made)
    plan = made.init_forward_metadata(batch)
    for spec in (wide, capped):
        layer = anyattn.AttentionLayer(spec, 0)
        with anyattn.forward_context(made, plan), pytest.raises(PlanError, match="not planned"):
            layer(*qkv(6, spec), batch)


def test_groups_are_planned_for_their_widest_layer() -> None:
    wide = anyattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=8)
    groups = GroupSet.from_specs([SPEC, wide, SPEC])
    assert list(groups.max_q_heads.values()) == [8]


def test_undeclared_features_are_refused_by_name() -> None:
    made = backend(features=())
    layer, batch = anyattn.AttentionLayer(SPEC, 0), prompt(made)
    plan = made.init_forward_metadata(batch)
    q, k, v = qkv(6)
    with anyattn.forward_context(made, plan):
        with pytest.raises(FeatureError, match="lse"):
            layer(q, k, v, batch, return_lse=True)
        with pytest.raises(FeatureError, match="no_cache_write"):
            layer(q, k, v, batch, save_kv_cache=False)
        with pytest.raises(FeatureError, match="topk_indices"):
            layer(q, k, v, batch, inputs=anyattn.LayerInputs(topk_indices=torch.zeros(6, 2)))


def test_window_layers_need_the_window_feature() -> None:
    spec = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, sliding_window=3)
    made = backend([spec], features=(Feature.LSE,))
    batch = prompt(made)
    plan = made.init_forward_metadata(batch)
    layer = anyattn.AttentionLayer(spec, 0)
    with anyattn.forward_context(made, plan), pytest.raises(FeatureError, match="window"):
        layer(*qkv(6), batch)


def test_lengths_absent_from_the_host_are_an_error_not_a_copy() -> None:
    made = backend()
    batch = prompt(made).view(host_lens=None)
    with pytest.raises(HostLengthError, match="host_lens"):
        made.init_forward_metadata(batch)


def test_inputs_stay_untouched_and_padding_rows_are_zero() -> None:
    made, layer = backend(), anyattn.AttentionLayer(SPEC, 0)
    made.table.req_to_token[1, :3] = torch.tensor([8, 9, 10], dtype=torch.int32)
    batch = anyattn.ForwardBatch.extend([1], [0], [3], [8, 9, 10, 0, 0], num_padding_tokens=2)
    plan = made.init_forward_metadata(batch)
    q, k, v = qkv(5)
    copies = [x.clone() for x in (q, k, v)]
    with anyattn.forward_context(made, plan):
        out = layer(q, k, v, batch)
    assert all(torch.equal(a, b) for a, b in zip(copies, (q, k, v), strict=True))
    assert torch.equal(out[3:], torch.zeros(2, 4, 8))
    assert bool((out[:3] != 0).any())


def test_hybrid_routes_modes_and_takes_the_childs_traits() -> None:
    first = backend()
    second = backend(pool=first.pool, table=first.table)
    both = HybridBackend(first, second, verify="decode")
    batch = prompt(first)
    assert both.init_forward_metadata(batch).key.owner == first.owner
    layer = anyattn.AttentionLayer(SPEC, 0)
    plan = both.init_forward_metadata(batch)
    with anyattn.forward_context(both, plan):
        layer(*qkv(6), batch)
    first.table.req_to_token[0, 6] = 10
    step = anyattn.ForwardBatch.decode([0], [7], [10])
    plan = both.init_forward_metadata(step)
    assert plan.key.owner == second.owner
    with anyattn.forward_context(both, plan):
        assert layer(*qkv(1), step).shape == (1, 4, 8)
    assert both.child(anyattn.ForwardMode.TARGET_VERIFY) is second
    assert both.traits(anyattn.ForwardMode.EXTEND) == first.traits(anyattn.ForwardMode.EXTEND)
    with pytest.raises(ConfigError):
        HybridBackend(first, backend())


def test_combined_traits_are_the_cautious_ones() -> None:
    a = Traits(
        host_lengths=HostLengthNeed.NONE,
        shared_read_ends=SharedReadEnds.PRE_REPLAY,
        graph=GraphSupport.ALWAYS,
        mixed=MixedSupport.NATIVE,
        ragged_verify=True,
    )
    b = Traits(
        host_lengths=HostLengthNeed.BOUND,
        shared_read_ends=SharedReadEnds.POST_REPLAY,
        graph=GraphSupport.UNIFORM,
        mixed=MixedSupport.REFUSED,
    )
    both = Traits.combine([a, b])
    assert both.host_lengths is HostLengthNeed.BOUND
    assert both.shared_read_ends is SharedReadEnds.POST_REPLAY
    assert both.graph is GraphSupport.UNIFORM
    assert both.mixed is MixedSupport.REFUSED
    assert not both.ragged_verify


def test_layers_with_shared_kv_read_their_owner() -> None:
    shared = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, kv_shared_with=0)
    made = backend([SPEC, shared])
    owner, reader = anyattn.AttentionLayer(SPEC, 0), anyattn.AttentionLayer(shared, 1)
    batch = prompt(made)
    plan = made.init_forward_metadata(batch)
    q, k, v = qkv(6)
    with anyattn.forward_context(made, plan):
        want = owner(q, k, v, batch)
        got = reader(q, None, None, batch)
    assert torch.equal(want, got)


@pytest.mark.parametrize(("slots", "page"), [(10, 4), (0, 4), (3, 4)])
def test_pools_are_whole_pages(slots: int, page: int) -> None:
    with pytest.raises(PoolError, match="num_slots="):
        MHAPool([SPEC], num_slots=slots, page_size=page, kv_dtype=torch.float32, dtype=torch.float32)
