"""The routed choice by each table that ships: in every bucket the fastest backend, or one in its noise."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest

import anyattn
from anyattn import api
from anyattn.bench.routed import host_of
from anyattn.core.measure import Bucket, MeasuredTable, Role, Shape, load_table
from anyattn.core.measure.compare import noise
from anyattn.core.measure.rules import RouteMap
from anyattn.core.select.decision import Decision
from anyattn.core.select.solve import decide

FOLDER = Path(__file__).parents[2] / "anyattn" / "data" / "measured"
TABLES = {path.stem: load_table(path) for path in sorted(FOLDER.glob("*.json"))}
H200 = "cuda-sm90.nvidia-h200"
LIMITS = anyattn.Limits(max_requests=512, max_tokens=1 << 16, max_context=1 << 20, max_draft_tokens=16)


def spec_of(shape: Shape) -> anyattn.AttentionSpec:
    latent = {"scale": 192**-0.5, "mla": anyattn.MLASpec()} if shape.mla else {}
    return anyattn.AttentionSpec(
        num_q_heads=shape.q_heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim, sliding_window=shape.window, **latent,
    )  # fmt: skip


def decided(table: MeasuredTable, bucket: Bucket) -> Decision:
    """On the table's own device, for a model of the bucket's layers on its page."""
    made = table.provenance
    facts = host_of(
        {"device": made.device, "arch": made.arch, "units": made.units, "versions": made.versions}
    )
    request = api.make_request(
        spec_of(bucket.shape), dtype=bucket.shape.dtype, kv_dtype=bucket.shape.kv_dtype, limits=LIMITS,
        device=api.device_type(facts.platform), page_size=bucket.page, route=True,
    )  # fmt: skip
    return decide(request, facts, api.registry(), api.platform_preferences(facts.platform), tables=[table])


def taken(decision: Decision, bucket: Bucket) -> str:
    route = decision.route(bucket.role)
    if route is None:
        return decision.serving(bucket.role).backend
    return RouteMap(route.members[0].backend, route.rules).backend(bucket.run, *bucket.size)


@functools.cache
def ratios(name: str) -> dict[Bucket, tuple[float, float]]:
    """Bucket -> the fastest time over that of who takes it, and the noise of the two."""
    table, decisions, found = TABLES[name], {}, {}
    for bucket, times in table.entries.items():
        key = bucket.shape, bucket.page
        decision = decisions.get(key) or decisions.setdefault(key, decided(table, bucket))
        mine, best = taken(decision, bucket), min(times, key=lambda n, of=times: of[n].seconds)
        found[bucket] = times[best].seconds / times[mine].seconds, noise(times[mine], times[best])
    return found


@pytest.mark.parametrize("name", TABLES)
def test_every_step_goes_to_the_fastest_within_the_noise(name: str) -> None:
    late = {
        f"{b}, {b.shape}": ratio for b, (ratio, allowed) in ratios(name).items() if ratio * (1 + allowed) < 1
    }
    assert not late


@pytest.mark.parametrize("role", Role)
def test_the_choice_on_an_h200_is_near_the_best_in_every_role(role: Role) -> None:
    found = [ratio for bucket, (ratio, _) in ratios(H200).items() if bucket.role is role]
    assert math.exp(sum(map(math.log, found)) / len(found)) >= 0.98
    assert min(found) >= 0.95
