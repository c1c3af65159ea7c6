"""A dropped backend of ours is gone at once, with its buffers, tables and workspaces."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo  # keeps the frames of whoever imports it first

import anyattn
from anyattn.core.capabilities import ModelKind
from anyattn.core.contract import StepBackend
from anyattn.testing.graph_kit import graph_subject
from anyattn.testing.interpreter import offer_triton
from anyattn.testing.mla_interpreter import offer_triton_mla


@pytest.fixture(autouse=True)
def _nobody_collects() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _reached(*roots: object) -> Iterator[Any]:
    """Backends and tensors that hang on `roots`."""
    seen, todo = set[int](), list(roots)
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, (ModuleType, type, FunctionType, BuiltinFunctionType)):
            continue
        seen.add(id(each))
        if isinstance(each, (torch.Tensor, StepBackend)):
            yield each
        if not isinstance(each, torch.Tensor):
            todo += gc.get_referents(each)


def _ran(kind: ModelKind, name: str) -> list[tuple[str, weakref.ref[Any]]]:
    """An eager step and a replay of one setup of the graphs' kit; what they left, all of it dropped."""
    subject = graph_subject("triton", "cpu", kinds=(kind,))
    setup = next(s for s in subject.setups() if s.name == name)
    lab = subject.labs(setup).lab
    with torch.no_grad():
        runner, step = lab.runner(), lab.draw(2)
        lab.fill_mask(step)
        runner.replay(step.batch, **step.inputs)
        step = lab.draw(2)
        lab.fill_mask(step)
        plan = lab.backend.init_forward_metadata(step.batch)
        with anyattn.forward_context(lab.backend, plan):
            lab.body(step.batch, **step.inputs)
    found = [(str(type(x).__name__), weakref.ref(x)) for x in _reached(lab.backend, runner, plan)]
    assert {"Tensor", type(lab.backend).__name__} <= {name for name, _ in found}
    return found


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ModelKind.DENSE, "decode, window 6, sinks"),
        (ModelKind.DENSE, "target_verify, chain"),
        (ModelKind.MLA, "decode of latents"),
    ],
)
def test_nothing_is_left(kind: ModelKind, name: str) -> None:
    (offer_triton if kind is ModelKind.DENSE else offer_triton_mla)()
    watched = _ran(kind, name)
    assert len(watched) > 30
    assert not [name for name, ref in watched if ref() is not None]
