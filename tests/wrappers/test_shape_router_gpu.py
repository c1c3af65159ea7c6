"""Routers on a GPU: decisions from a table of the device, steps by several libraries, a graph a route."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

import anyattn
from anyattn import api
from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.capabilities import Phase
from anyattn.core.graph.buckets import Buckets
from anyattn.core.graph.runner import GraphRunner
from anyattn.core.measure import Bucket, MeasuredTable, Provenance, Role, Shape, Timing
from anyattn.core.select.decision import Decision
from anyattn.core.select.measured import runs_on
from anyattn.core.select.solve import decide
from anyattn.core.wrappers import HybridBackend, ShapeRouter
from anyattn.platforms.graphs import graph_platform

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SPECS = [anyattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)] * 2
LIMITS = anyattn.Limits(max_requests=8, max_tokens=2048, max_context=2048)
PAGE, HEADS = 16, (32, 8, 8)
STEPS = ((1, 100), (1, 1800), (3, 100), (8, 1800), (8, 100), (5, 700))


def passing(request: object, host: object) -> tuple[str, ...]:
    """Backends that pass in decode on the pool of page 16, second-rate ones left out."""
    plain = decide(request, host, api.registry(), api.platform_preferences("cuda"), tables=[])  # type: ignore[arg-type]
    good = {c.backend for c in plain.candidates if c.phase is Phase.DECODE and c.verdict.kind == "accepted"}
    return tuple(name for name in ("triton", "flashinfer", "fa3") if name in good)


def routed() -> Decision:
    """A decision routed by an invented table of this device: sizes side by side have other winners."""
    host = api.host_facts("cuda")
    request = api.make_request(
        SPECS, dtype=torch.bfloat16, device="cuda", limits=LIMITS, page_size=PAGE, layout="NHD", route=True
    )
    names = passing(request, host)
    if len(names) < 2:
        pytest.skip("one backend alone has nothing to be routed with")
    versions = {"anyattn": anyattn.__version__}
    for record in (api.registry().get(name) for name in names):
        for row in record.rows:
            versions |= {k: v for k, v in runs_on(row, host).items() if v}
    shape = Shape.of(SPECS[0], "bfloat16", "bfloat16")
    entries = {}
    for run in ("eager", "graph"):
        for i, kv_len in enumerate((128, 1024, 2048)):
            for requests in (1, 4, 8):
                best = names[(i + requests) % len(names)]
                bucket = Bucket(
                    role=Role.DECODE, shape=shape, page=PAGE, layout="NHD", run=run, requests=requests,
                    kv_len=kv_len,
                )  # fmt: skip
                entries[bucket] = {name: Timing(1e-5 if name == best else 2e-5) for name in names}
    table = MeasuredTable(
        Provenance(device=host.device_name, arch=host.target, versions=versions), entries, "invented"
    )
    return decide(request, host, api.registry(), api.platform_preferences("cuda"), tables=[table])


class World:
    """Random KV of eight requests, and the backends of a decision on it."""

    def __init__(self, decision: Decision) -> None:
        self.decision, self.generator = decision, torch.Generator("cuda").manual_seed(0)
        pages = 8 * LIMITS.max_context // PAGE
        self.pool = anyattn.kv.create_pool(decision, num_slots=pages * PAGE)
        self.table = anyattn.kv.RequestTable(max_requests=8, max_context=LIMITS.max_context, device="cuda")
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)) + 1
        slots = (order[:, None] * PAGE + torch.arange(PAGE)).view(8, LIMITS.max_context)
        self.table.req_to_token[:8] = slots.int().cuda()
        for layer in range(2):
            for cache in (self.pool.key_cache(layer), self.pool.value_cache(layer)):
                cache.copy_(torch.randn(cache.shape, device="cuda", generator=self.generator))
        self.layers = [anyattn.AttentionLayer(spec, i) for i, spec in enumerate(SPECS)]

    def backend(self, name: str | None = None) -> HybridBackend | object:
        decision = self.decision
        if name is not None:
            decision = anyattn.select(
                SPECS,
                dtype=torch.bfloat16,
                device="cuda",
                limits=LIMITS,
                page_size=PAGE,
                layout="NHD",
                backend=name,
            )
        return anyattn.create_backend(decision, self.pool, self.table)

    def step(self, requests: int, kv_len: int) -> tuple[ForwardBatch, list[torch.Tensor]]:
        rng = random.Random(requests * 10_000 + kv_len)
        rows = rng.sample(range(8), requests)
        lens = [max(1, kv_len - rng.randrange(20)) for _ in rows]
        loc = [int(self.table.req_to_token[r, n - 1]) for r, n in zip(rows, lens, strict=True)]
        made = [torch.randn(requests, h, 128, device="cuda", generator=self.generator) for h in HEADS]
        return ForwardBatch.decode(rows, lens, loc), [x.bfloat16() for x in made]

    def run(self, backend: object, batch: ForwardBatch, qkv: list[torch.Tensor]) -> torch.Tensor:
        plan = backend.init_forward_metadata(batch)  # type: ignore[attr-defined]
        with anyattn.forward_context(backend, plan):  # type: ignore[arg-type]
            return self.body(batch, *qkv).clone()

    def body(self, batch: ForwardBatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](q, k, v, batch)
        assert isinstance(x, torch.Tensor)
        y = self.layers[1](q, k, v, batch)
        assert isinstance(y, torch.Tensor)
        return torch.cat([x, y], dim=1)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).abs().max() / want.float().abs().max())


def test_steps_go_where_the_table_says_and_are_right() -> None:
    world = World(routed())
    backend, reference = world.backend(), world.backend("torch_native")
    assert isinstance(backend, HybridBackend)
    router = backend.child(ForwardMode.DECODE)
    assert isinstance(router, ShapeRouter)
    owners = set()
    for requests, kv_len in STEPS:
        batch, qkv = world.step(requests, kv_len)
        want = world.run(reference, batch, qkv)
        plan = backend.init_forward_metadata(batch)
        owners.add(plan.key.owner)
        assert error(world.run(backend, batch, qkv), want) < 2e-2, (requests, kv_len)
    assert len(owners) == len(router.members), "every member took a step"


def test_replays_go_by_the_same_rules_and_equal_the_member_alone() -> None:
    world = World(routed())
    backend, reference = world.backend(), world.backend("torch_native")
    zeros = [torch.zeros(8, h, 128, device="cuda", dtype=torch.bfloat16) for h in HEADS]
    inputs = dict(zip("qkv", zeros, strict=True))
    platform = graph_platform(torch.device("cuda"))
    runner = GraphRunner(
        backend, world.body, platform, limits=LIMITS, inputs=inputs, buckets=Buckets([1, 4, 8])
    )
    runner.capture()
    assert isinstance(backend, HybridBackend)
    members = backend.routes(ForwardMode.DECODE)
    assert len(runner.memory()) == 3 * len(members)
    seen = set()
    for requests, kv_len in STEPS * 2:
        batch, qkv = world.step(requests, kv_len)
        entry = runner.entry(batch)
        seen.add(entry.key.route)
        assert entry.key.route == backend.route_of(batch)
        got = runner.replay(batch, **dict(zip("qkv", qkv, strict=True)))
        assert error(got, world.run(reference, batch, qkv)) < 2e-2, (entry.key, kv_len)
    assert seen == set(members)


def test_the_decision_survives_its_json() -> None:
    decision = routed()
    assert Decision.from_json(decision.to_json()) == decision
    assert dataclasses.replace(decision, routes=()).digest() != decision.digest()
