"""Check of graphs: what can't be captured or replayed is refused by name, and captured graphs stay usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyattn
from anyattn.core.batch import ForwardMode
from anyattn.errors import GraphError
from anyattn.testing.graph_checks import Labs, whole_buckets

__all__ = ["refusals"]


def refusals(labs: Labs) -> list[str]:
    """Each refusal of the graph logic, and a right replay after it."""
    lab, runner = labs.lab, labs.runner
    full = lab.draw(max(whole_buckets(lab)))
    over = lab.draw(max(whole_buckets(lab)) + 1)
    fresh = lab.runner(capture=False)
    pool = lab.backend.pool

    def replaced() -> None:
        lab.backend.pool = anyattn.kv.create_pool(lab.decision, num_slots=pool.num_slots)
        try:
            runner.replay(full.batch, **full.inputs)
        finally:
            lab.backend.pool = pool

    def nested(inside: Callable[[], Any]) -> Callable[[], None]:
        return lambda: labs.hooks.inner.new_graph().capture(lambda: inside() and None)

    tries: tuple[tuple[str, str, Callable[[], Any]], ...] = (
        ("a batch over the largest bucket", "largest captured bucket", lambda: runner.replay(over.batch)),
        ("a mode never captured", "never captured", lambda: fresh.replay(full.batch, **full.inputs)),
        ("a mode without full graphs", "no full graph", lambda: runner.capture(ForwardMode.EXTEND)),
        ("a replay after the pool was replaced", "pool was replaced", replaced),
        ("a capture inside a capture", "capture inside another capture", nested(fresh.capture)),
        ("a replay inside a capture", "replay inside another capture",
         nested(lambda: runner.replay(full.batch, **full.inputs))),
    )  # fmt: skip
    found = []
    for what, said, attempt in tries:
        try:
            lab.fill_mask(full)
            attempt()
            found.append(f"{what} was not refused")
        except GraphError as error:
            if said not in str(error):
                found.append(f"{what}: refused for another reason: {error}")
        found += [f"after {what}: {fault}" for fault in labs.judged(full)]
    return found
