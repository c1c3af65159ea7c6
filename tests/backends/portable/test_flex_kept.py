"""Kernels of FlexAttention aren't taken from torch's cache, whose guards forget blocks and tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, sym_or

from anyattn.backends.portable import flex_kernel


@pytest.mark.parametrize(
    ("device", "kept"), [("cuda", {"fx_graph_cache": False, "fx_graph_remote_cache": False}), ("cpu", None)]
)
def test_what_is_compiled_is_kept_in_this_process_alone(
    device: str, kept: dict[str, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the graph's cache torch doesn't use the one in front of it either (autograd_cache.py)."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: asked.append(how) or function)
    spec = flex_kernel.Specialisation((1, 1, 64, 64), torch.float16, False, False, device, (16, 128))
    flex_kernel.compiled.__wrapped__(spec)
    (how,) = asked
    assert how.get("options") == kept
    assert how["backend"] == ("eager" if device == "cpu" else "inductor")
    for name in kept or {}:
        assert hasattr(torch._inductor.config, name)


def test_a_guard_with_an_or_hides_the_guards_beside_it() -> None:
    """The reason: where this fails, torch has mended it, and kernels may be kept again."""
    shapes, numbers = ShapeEnv(duck_shape=False), {"tile": 16, "keys": 4, "queries": 4}
    sources = {name: ConstantSource(name) for name in numbers}
    tile, keys, queries = (
        shapes.create_symintnode(
            shapes.create_symbol(value, sources[name], dynamic_dim=DimDynamic.DYNAMIC),
            hint=value,
            source=sources[name],
        )
        for name, value in numbers.items()
    )
    assert tile == 16
    assert sym_or(keys == 1, keys == queries)
    expression = shapes.produce_guards_expression([tile, keys, queries])
    assert expression is not None
    if "(" in expression:
        pytest.skip("this torch writes parentheses: kernels may be kept again")
    assert shapes.evaluate_guards_expression(expression, [16, 4, 4])
    assert shapes.evaluate_guards_expression(expression, [128, 4, 4]), "torch forgets the tile"
