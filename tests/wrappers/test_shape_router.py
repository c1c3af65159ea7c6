"""`ShapeRouter`: who takes which step, what it declares, and what it refuses. Two references on one pool."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import anyattn
from anyattn.core.batch import Exact, ForwardBatch, ForwardMode, UpperBound
from anyattn.core.capabilities import Feature, Phase
from anyattn.core.contract import AttentionBackend
from anyattn.core.measure.bucket import Role
from anyattn.core.measure.rules import RouteMap, RouteRule
from anyattn.core.select.decision import Decision, Route
from anyattn.core.traits import Determinism, HostLengthNeed, KVRead, SharedReadEnds, Traits
from anyattn.core.wrappers import HybridBackend, ShapeRouter
from anyattn.core.wrappers.shape_router import step_size
from anyattn.errors import ConfigError, FeatureError, HostLengthError, PlanError

SPECS = [anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16)] * 2
RULES = (
    RouteRule("eager", 1, 8, 1, "small"),
    RouteRule("eager", 1, 64, 1, "large"),
    RouteRule("graph", 1, 8, 1, "large"),
    RouteRule("graph", 1, 64, 1, "small"),
)
GENERATOR = torch.Generator().manual_seed(0)


def decided(**options: object) -> Decision:
    limits = anyattn.Limits(max_requests=4, max_tokens=64, max_context=64)
    return anyattn.select(SPECS, dtype=torch.float32, device="cpu", backend="torch_native", limits=limits,
                          page_size=4, **options)  # fmt: skip


def named(decision: Decision, name: str) -> Decision:
    choices = {p.value: dataclasses.replace(decision.phase(p), backend=name) for p in Phase}
    return dataclasses.replace(decision, **choices)  # type: ignore[arg-type]


class World:
    """Pool, table and two backends with names of their own; the first is `small`."""

    def __init__(self, **options: object) -> None:
        decision = decided(**options)
        self.pool = anyattn.kv.create_pool(decision, num_slots=256)
        self.table = anyattn.kv.RequestTable(max_requests=4, max_context=64, device="cpu")
        self.members = [self.build(named(decision, name)) for name in ("small", "large")]
        slots = 4 + torch.arange(4 * 64).view(4, 64) % 252
        self.table.req_to_token[:4] = slots.int()

    def build(self, decision: Decision) -> AttentionBackend:
        made = anyattn.create_backend(decision, self.pool, self.table)
        assert isinstance(made, AttentionBackend)
        return made

    def router(self) -> ShapeRouter:
        return ShapeRouter(self.members, RULES)

    def decode(self, *lengths: int, **options: object) -> ForwardBatch:
        rows = list(range(len(lengths)))
        loc = [int(self.table.req_to_token[r, n - 1]) for r, n in zip(rows, lengths, strict=True)]
        return ForwardBatch.decode(rows, list(lengths), loc, **options)  # type: ignore[arg-type]


@pytest.fixture(name="world")
def _world() -> World:
    return World()


# --- rules -------------------------------------------------------------------------------------------


def test_the_nearest_rule_decides() -> None:
    routes = RouteMap("first", [RouteRule("graph", 1, 1024, 1, "a"), RouteRule("graph", 64, 8192, 1, "b")])
    assert routes.backend("graph", 1, 900, 1) == "a"
    assert routes.backend("graph", 50, 10_000, 1) == "b"
    assert routes.backend("graph", 512, 131_072, 1) == "b", "beyond the table the nearest one stands"
    assert routes.backend("eager", 64, 8192, 1) == "b", "without rules for a run, those of the other"
    assert routes.backend("graph", 64, None, 1) == "first"
    assert RouteMap("first").backend("graph", 1, 1, 1) == "first"


def test_counts_of_rules_are_powers_of_two() -> None:
    rule = RouteRule("graph", 60, 8191, 1, "a")
    assert (rule.requests, rule.kv_len) == (64, 8192)
    with pytest.raises(ConfigError, match="run of a route rule"):
        RouteRule("warm", 1, 1, 1, "a")
    with pytest.raises(ConfigError, match="kv_len of a route rule; asked: nan"):
        RouteRule("graph", 1, float("nan"), 1, "a")  # type: ignore[arg-type]


def test_a_step_is_measured_by_what_the_host_knows(world: World) -> None:
    assert step_size(world.decode(10, 20, 60)) == (3, 30, 1, 0)
    padded = ForwardBatch.decode([0, 4], [40, 1], [3, 0], num_padding_requests=1)
    assert step_size(padded) == (1, 40, 1, 0)
    extend = ForwardBatch.extend([0, 1], [8, 0], [4, 12], list(range(16)))
    assert step_size(extend) == (2, 12, 8, 0)
    bound = world.decode(10, 20).view(host_lens=UpperBound(33))
    assert step_size(bound) == (2, 33, 1, 0)
    assert step_size(bound.view(host_lens=None)) == (2, None, 1, 0)
    chunk = ForwardBatch.mixed([0, 1, 2], [4, 15, 39], [12, 1, 1], list(range(14)))
    assert step_size(chunk) == (3, 24, 12, 1), "new tokens are those of the prompt"
    rows = ForwardBatch.mixed([1, 2], [15, 39], [1, 1], list(range(2)))
    assert step_size(rows) == (2, 28, 1, 0)
    nobody = ForwardBatch.decode([4, 4], [1, 1], [0, 0], num_padding_requests=2)
    assert step_size(nobody)[0] == 1, "padding alone counts as one request"
    assert world.router().init_forward_metadata(nobody).key.mode is ForwardMode.DECODE


# --- routes ------------------------------------------------------------------------------------------


def owner(router: ShapeRouter, plan: anyattn.core.plan.Plan) -> str:  # type: ignore[name-defined]
    return next(m.config.name for m in router.all if m.owner == plan.key.owner)


def test_steps_go_by_size_and_eager_and_graphs_by_rules_of_their_own(world: World) -> None:
    router = world.router()
    assert owner(router, router.init_forward_metadata(world.decode(5))) == "small"
    assert owner(router, router.init_forward_metadata(world.decode(60))) == "large"
    assert (router.route_of(world.decode(5)), router.route_of(world.decode(60))) == ("large", "small")
    assert router.routes(ForwardMode.DECODE) == ("small", "large")
    assert router.routed(ForwardMode.DECODE, "large") is world.members[1]
    assert owner(router, router.init_forward_metadata(ForwardBatch.idle())) == "small"


def test_a_request_may_change_hands_between_steps(world: World) -> None:
    """Prefill by one member, each decode step by another: the same as one backend alone."""
    layer = anyattn.AttentionLayer(SPECS[0], 0)
    tokens = 12
    q, k, v = (torch.randn(tokens, heads, 16, generator=GENERATOR) for heads in (4, 2, 2))

    def all_steps(backend: ShapeRouter | AttentionBackend) -> list[torch.Tensor]:
        loc = world.table.req_to_token[0, :tokens].tolist()
        batches = [ForwardBatch.extend([0], [0], [tokens - 4], loc[: tokens - 4])]
        batches += [world.decode(n) for n in range(tokens - 3, tokens + 1)]
        outs, done = [], 0
        for batch in batches:
            span = slice(done, done + batch.num_tokens)
            plan = backend.init_forward_metadata(batch)
            with anyattn.forward_context(backend, plan):
                out = layer(q[span], k[span], v[span], batch)
            assert isinstance(out, torch.Tensor)
            outs.append(out)
            done = span.stop
        return outs

    rules = [RouteRule("eager", 1, 1 << i, 1, ("small", "large")[i % 2]) for i in range(6)]
    alone = all_steps(world.members[0])
    routed = all_steps(ShapeRouter(world.members, rules))
    assert all(torch.equal(a, b) for a, b in zip(alone, routed, strict=True))


def test_a_plan_of_somebody_else_is_refused(world: World) -> None:
    router = world.router()
    stranger = world.build(decided())
    batch = world.decode(5)
    layer = anyattn.AttentionLayer(SPECS[0], 0)
    q, kv = torch.zeros(1, 4, 16), torch.zeros(1, 2, 16)
    with (
        pytest.raises(PlanError, match="outside this route"),
        anyattn.forward_context(router, stranger.init_forward_metadata(batch)),
    ):
        layer(q, kv, kv, batch)
    with pytest.raises(ConfigError, match="route of a step"):
        router.routed(ForwardMode.DECODE, "nobody")


# --- what it declares --------------------------------------------------------------------------------


def declaring(member: AttentionBackend, **fields: object) -> None:
    member.traits = lambda mode: Traits(**fields)  # type: ignore[method-assign,assignment,arg-type]


def test_traits_are_those_that_hold_for_every_member(world: World) -> None:
    declaring(world.members[0], host_lengths=HostLengthNeed.NONE, shared_read_ends=SharedReadEnds.PRE_REPLAY,
              determinism=Determinism.BATCH_INVARIANT)  # fmt: skip
    declaring(world.members[1], host_lengths=HostLengthNeed.BOUND, shared_read_ends=SharedReadEnds.IN_REPLAY,
              determinism=Determinism.BATCH_INVARIANT)  # fmt: skip
    traits = world.router().traits(ForwardMode.DECODE)
    assert traits.host_lengths is HostLengthNeed.BOUND
    assert traits.shared_read_ends is SharedReadEnds.IN_REPLAY
    assert traits.determinism is Determinism.RUN_TO_RUN, "alone and in a batch, steps go to different members"


def test_a_need_of_one_member_is_asked_for_on_every_route(world: World) -> None:
    router = world.router()
    declaring(world.members[0], host_lengths=HostLengthNeed.NONE)
    declaring(world.members[1], host_lengths=HostLengthNeed.EXACT)
    with pytest.raises(HostLengthError, match=r"small\+large needs exact lengths"):
        router.init_forward_metadata(world.decode(5).view(host_lens=None))
    assert isinstance(world.decode(5).host_lens, Exact)


def test_a_feature_that_one_member_lacks_is_refused_on_every_route() -> None:
    world = World(features=["lse"])
    small, large = world.members
    large.restrict(ForwardMode.DECODE, large.features(ForwardMode.DECODE) - {Feature.LSE})
    router = world.router()
    layer, batch = anyattn.AttentionLayer(SPECS[0], 0), world.decode(5)
    q, kv = torch.zeros(1, 4, 16), torch.zeros(1, 2, 16)
    plan = router.init_forward_metadata(batch)
    assert owner(router, plan) == "small"
    with (
        pytest.raises(FeatureError, match="small does not support lse"),
        anyattn.forward_context(router, plan),
    ):
        layer(q, kv, kv, batch, return_lse=True)
    assert Feature.LSE in small.features(ForwardMode.EXTEND), "other modes aren't touched"


def test_members_write_kv_alike(world: World) -> None:
    layer = anyattn.AttentionLayer(SPECS[0], 0)
    k, v = torch.randn(3, 2, 16, generator=GENERATOR), torch.randn(3, 2, 16, generator=GENERATOR)
    loc = torch.tensor([9, 30, 4])
    found = []
    for member in world.members:
        for cache in (world.pool.key_cache(0), world.pool.value_cache(0)):
            cache.zero_()
        member.write_kv(layer, loc, k, v)
        found.append((world.pool.key_cache(0).clone(), world.pool.value_cache(0).clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][0].abs().sum() > 0


# --- what can't be routed ----------------------------------------------------------------------------


def test_members_that_do_not_fit_are_refused(world: World) -> None:
    small, large = world.members
    with pytest.raises(ConfigError, match="two different backends or more"):
        ShapeRouter([small], ())
    with pytest.raises(ConfigError, match="two different backends or more"):
        ShapeRouter([small, small], ())
    with pytest.raises(ConfigError, match=r"member of a route; .*allowed: AttentionBackend"):
        ShapeRouter([world.router(), large], ())  # type: ignore[list-item]
    assert ShapeRouter(iter(world.members), RULES).routes(ForwardMode.DECODE) == ("small", "large")
    with pytest.raises(ConfigError, match="share one pool"):
        ShapeRouter([small, World().members[1]], ())
    with pytest.raises(ConfigError, match="rules of a route name its members"):
        ShapeRouter([small, large], [RouteRule("eager", 1, 1, 1, "medium")])


def test_quantised_kv_is_read_alike_by_all() -> None:
    world = World(kv_dtype=torch.float8_e4m3fn)
    declaring(world.members[0], kv_read=KVRead.DIRECT)
    declaring(world.members[1], kv_read=KVRead.READ_BACK)
    with pytest.raises(ConfigError, match="see a step's own tokens alike"):
        world.router()


# --- from a decision ---------------------------------------------------------------------------------


def test_a_decision_with_routes_builds_routers(world: World) -> None:
    decision = decided()
    twins = tuple(dataclasses.replace(decision.decode, backend=name) for name in ("torch_native", "large"))
    rules = (RouteRule("eager", 1, 64, 1, "large"), RouteRule("eager", 1, 8, 1, "torch_native"))
    routed = dataclasses.replace(decision, routes=(Route(Role.DECODE, twins, rules),))
    again = Decision.from_json(routed.to_json())
    assert again == routed
    assert again.digest() == routed.digest() != decision.digest()
    backend = anyattn.create_backend(again, world.pool, world.table)
    assert isinstance(backend, HybridBackend)
    router = backend.child(ForwardMode.DECODE)
    assert isinstance(router, ShapeRouter)
    assert backend.child(ForwardMode.EXTEND) is router.first, "one object serves both"
    assert backend.decision == routed
    assert backend.routes(ForwardMode.DECODE) == ("torch_native", "large")
    assert backend.routes(ForwardMode.EXTEND) == ("",)
    assert backend.route_of(world.decode(60)) == "large"
    assert backend.routed(ForwardMode.DECODE, "large") is router.members["large"]
    assert owner(router, backend.init_forward_metadata(world.decode(60))) == "large"


def test_mixed_steps_and_verification_have_routers_of_their_own(world: World) -> None:
    limits = anyattn.Limits(max_requests=4, max_tokens=64, max_context=64, max_draft_tokens=4)
    decision = anyattn.select(SPECS, dtype=torch.float32, device="cpu", backend="torch_native",
                              limits=limits, page_size=4)  # fmt: skip
    verify = tuple(dataclasses.replace(decision.decode, backend=name) for name in ("torch_native", "large"))
    mixed = tuple(dataclasses.replace(decision.prefill, backend=name) for name in ("torch_native", "other"))
    routes = (
        Route(
            Role.VERIFY,
            verify,
            (RouteRule("graph", 1, 8, 2, "torch_native"), RouteRule("graph", 1, 64, 2, "large")),
        ),
        Route(
            Role.MIXED,
            mixed,
            (RouteRule("eager", 2, 16, 8, "other", 1), RouteRule("eager", 2, 16, 8, "torch_native", 2)),
        ),
    )
    backend = anyattn.create_backend(dataclasses.replace(decision, routes=routes), world.pool, world.table)
    assert isinstance(backend, HybridBackend)
    verifier, mixer = (backend.child(mode) for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.MIXED))
    assert isinstance(verifier, ShapeRouter)
    assert isinstance(mixer, ShapeRouter)
    assert backend.child(ForwardMode.EXTEND) is backend.child(ForwardMode.DECODE) is mixer.first
    assert backend.routes(ForwardMode.TARGET_VERIFY) == ("torch_native", "large")
    assert backend.routes(ForwardMode.DECODE) == ("",)
    loc = world.table.req_to_token[0, 50:52].tolist()
    chain = ForwardBatch.verify([0], [50], [2], loc)
    assert backend.route_of(chain) == "large"
    assert verifier.why(chain) == "target_verify (graph): large, as measured at 1 x 64, 2 new (graph)"
    rows = world.table.req_to_token
    step = ForwardBatch.mixed([0, 1], [0, 20], [9, 1], [*rows[0, :9].tolist(), int(rows[1, 20])])
    assert owner(mixer, backend.init_forward_metadata(step)) == "other"
    assert mixer.why(step, "eager") == "mixed (eager): other, as measured at 2 x 16, 1 with 8 new (eager)"
    assert mixer.why(ForwardBatch.idle()) == "idle (graph): torch_native, no rule speaks of this step"


def test_a_backend_of_mixed_steps_alone(world: World) -> None:
    decision = decided()
    other = dataclasses.replace(decision.prefill, backend="other")
    backend = anyattn.create_backend(dataclasses.replace(decision, mixed=other), world.pool, world.table)
    assert isinstance(backend, HybridBackend)
    served = {mode: backend.child(mode).config.name for mode in ForwardMode}
    assert {mode for mode, name in served.items() if name == "other"} == {ForwardMode.MIXED}


def test_rules_for_prompts_beside_decoding_requests() -> None:
    """Two mixed steps whose means lie near each other, and which differ in their prompts."""
    rules = [RouteRule("eager", 64, 4096, 2048, "a", 1), RouteRule("eager", 128, 2048, 1024, "b", 2)]
    routes = RouteMap("first", rules)
    assert routes.backend("eager", 64, 4128, 2048, 1) == "a"
    assert routes.backend("eager", 128, 2587, 1024, 2) == "b"
    assert routes.backend("eager", 90, 2900, 2048, 1) == "a"
    assert routes.rule("eager", 128, 2587, 1024, 2) is rules[1]
    assert str(rules[0]) == "64 x 4096, 1 with 2048 new"
