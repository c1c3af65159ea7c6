"""Runs the kit on a `ShapeRouter` of triton (interpreted) and torch_native, and the graph checks on one of
fa3 (emulated) and triton, in the CPU recorder; prints JSON.

Started by test_shape_router_kit.py in a process of its own: Triton reads TRITON_INTERPRET once.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyattn
from anyattn.core.batch import ForwardBatch
from anyattn.core.capabilities import ModelKind
from anyattn.core.measure.bucket import RUNS
from anyattn.core.measure.rules import RouteRule
from anyattn.core.wrappers import ShapeRouter
from anyattn.testing.graph_emulated import install_recordable
from anyattn.testing.graph_kit import graph_subject, run_setup
from anyattn.testing.kit import run_items
from anyattn.testing.plan import plan_kit
from anyattn.testing.selecting import select_for
from anyattn.testing.subject import open_subject

SEEN: Counter[str] = Counter()
PLAIN = anyattn.create_backend


class Counting(ShapeRouter):
    """Notes where steps went."""

    def _name(self, batch: ForwardBatch, run: str) -> str:
        name = super()._name(batch, run)
        SEEN[f"{run} {name}"] += 1
        return name


def rules(names: tuple[str, ...]) -> list[RouteRule]:
    """Members in turns, by the length: sizes that lie next to each other go to different ones."""
    sizes = [(requests, 1 << i, names[(i + requests) % 2]) for i in range(10) for requests in (1, 2, 4)]
    return [RouteRule(run, requests, length, 1, name) for run in RUNS for requests, length, name in sizes]


def routing(other: str, host: str | None = None) -> Callable[..., ShapeRouter]:
    """In place of `create_backend`: a router of its backend and of `other`, on the same pool."""

    def create(decision: Any, pool: Any, table: Any, **options: Any) -> ShapeRouter:
        request = decision.request
        names = ("dtype", "device", "limits", "kv_dtype", "features", "deterministic")
        asked = {name: getattr(request, name) for name in names}
        pool_of = {"page_size": decision.kv.page_size, "layout": decision.kv.layout}
        second = select_for(request.specs, **asked, **pool_of, host=host, backend=other)
        own = PLAIN(decision, pool, table, **options)
        router = Counting([own, PLAIN(second, pool, table)], rules((own.config.name, other)))
        router.decision = decision
        return router

    return create


CHECKS = ("replays", "padding", "keeps-alive", "staging")
BY_ROUTE = ("batch-invariant", "batch-invariant-chunks")
"""What a route doesn't promise, since its members compute in different orders."""


def kit(every: int) -> dict[str, Any]:
    """Some of the kit's items on triton's declarations: of the plain numbers one in `every`."""
    subject = open_subject("triton", "cpu")
    anyattn.create_backend = routing("torch_native")
    items = [item for item in plan_kit(subject.declared).items if item.check not in BY_ROUTE]
    plain = [item for item in items if item.check == "numbers"][::every]
    promises = [item for item in items if item.check != "numbers"][::3]
    results = run_items([*plain, *promises], subject, explain=False)
    return {
        "passed": sum(r.passed for r in results),
        "failed": [f"{r.item.check} {r.item.name}: {r.why}" for r in results if r.why is not None],
        "skipped": [f"{r.item.check}: {r.skipped}" for r in results if r.skipped is not None],
    }


def graphs(name: str) -> dict[str, Any]:
    """The graph checks on the recorder, of one kind of step: fa3, emulated, and triton."""
    subject = graph_subject("fa3", "cpu", install_recordable("fa3").host, (ModelKind.DENSE,))
    subject = dataclasses.replace(subject, buckets=(1, 4))
    anyattn.create_backend = routing("triton", subject.host)
    setup = next(s for s in subject.setups() if s.name == name)
    results = list(run_setup(subject, setup, CHECKS, replays=3))
    return {
        "passed": sorted({r.check for r in results if r.passed}),
        "failed": [f"{r.setup} {r.check}: {r.faults}" for r in results if r.faults],
        "skipped": [f"{r.check}: {r.skipped}" for r in results if r.skipped],
    }


def main() -> None:
    """`kit EVERY` or `graphs SETUP`."""
    done = kit(int(sys.argv[2])) if sys.argv[1] == "kit" else graphs(sys.argv[2])
    print(json.dumps(done | {"seen": dict(SEEN)}))


if __name__ == "__main__":
    main()
