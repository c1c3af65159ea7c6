"""A dropped backend is gone at once, with all that it has on a device: Python needn't look for cycles first.

Collectors count objects, not bytes: a cycle through a backend keeps workspaces of gigabytes for as long as
few objects are made.

`torch._dynamo` is imported here because captures import it: `torch.fx.wrap` then keeps its own frame in a
cycle, and with it the frames of all callers, a backend's among them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo  # its first import leaves a cycle through the frames of whoever imports it: see below

import anyattn
from anyattn.core.batch import ForwardMode
from anyattn.core.contract import AttentionBackend, StepBackend
from anyattn.core.graph.buckets import Buckets
from anyattn.core.graph.recorder import RecorderPlatform
from anyattn.core.graph.runner import GraphRunner
from anyattn.core.known_layer import PlainCall, unheld
from anyattn.core.mla import MLAMethod, MLAPolicy
from anyattn.core.spec import MLASpec
from anyattn.testing.emulators import emulating
from anyattn.testing.emulators.flashinfer_common import host_reads
from anyattn.testing.graph_emulated import install_recordable
from anyattn.testing.selecting import select_for

CONTEXT, ROWS = 96, 3
DENSE = anyattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)
LATENT = anyattn.AttentionSpec(
    num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=0.1,
    mla=MLASpec(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128),
)  # fmt: skip


class World:
    """A backend with all that belongs to it, and steps on it."""

    def __init__(self, spec: anyattn.AttentionSpec, dtype: torch.dtype, **asked: Any) -> None:
        self.limits = anyattn.Limits(max_requests=ROWS, max_tokens=4 * ROWS, max_context=CONTEXT)
        decision = select_for([spec] * 2, device="cpu", dtype=dtype, limits=self.limits, **asked)
        self.spec, self.dtype = spec, dtype
        self.pool = anyattn.kv.create_pool(decision, num_slots=(ROWS + 1) * 2 * CONTEXT)
        self.table = anyattn.kv.RequestTable(max_requests=ROWS, max_context=CONTEXT)
        page = self.pool.page_size
        width = -(-CONTEXT // page) * page
        slots = torch.arange(ROWS * width).view(ROWS, width) + page
        self.table.req_to_token[:ROWS] = slots[:, :CONTEXT]
        policy: dict[str, Any] = {} if spec.mla is None else {"mla": MLAPolicy(method=MLAMethod.ABSORBED)}
        self.backend: Any = anyattn.create_backend(decision, self.pool, self.table, **policy)
        self.layers = [anyattn.AttentionLayer(spec, i) for i in range(2)]

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        s = self.spec
        shapes = {"q": (s.num_q_heads, s.head_dim), "k": (s.num_kv_heads, s.head_dim)}
        if s.mla is None:
            shapes["v"] = (s.num_kv_heads, s.v_head_dim)
        return {name: torch.randn(tokens, *shape).to(self.dtype) for name, shape in shapes.items()}

    def body(self, batch: anyattn.ForwardBatch, **inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            out: torch.Tensor = layer(inputs["q"], inputs["k"], inputs.get("v"), batch)
        return out

    def decode(self, *lens: int) -> anyattn.ForwardBatch:
        rows = list(range(len(lens)))
        loc = [int(self.table.req_to_token[r, n - 1]) for r, n in zip(rows, lens, strict=True)]
        return anyattn.ForwardBatch.decode(rows, list(lens), loc)

    def eager(self, batch: anyattn.ForwardBatch) -> anyattn.Plan:
        plan: anyattn.Plan = self.backend.init_forward_metadata(batch)
        with anyattn.forward_context(self.backend, plan):
            self.body(batch, **self.inputs(batch.num_tokens))
        return plan

    def steps(self) -> list[anyattn.Plan]:
        """Tokens on nothing, on a prefix, and decode, twice."""
        extend = anyattn.ForwardBatch.extend
        loc = self.table.req_to_token[0, :6].long()
        plans = [self.eager(extend([0], [0], [4], loc[:4])), self.eager(extend([0], [4], [2], loc[4:]))]
        return plans + [self.eager(self.decode(*lens)) for lens in ((3, 9), (4, 10))]

    def replayed(self) -> Any:
        """What a graph of decode keeps, after a replay."""
        if self.backend.traits(ForwardMode.DECODE).graph.name != "NEVER":
            runner = GraphRunner(
                self.backend, self.body, RecorderPlatform(), limits=self.limits, buckets=Buckets((2,)),
                inputs=self.inputs(self.limits.max_tokens),
            )  # fmt: skip
            runner.capture()
            runner.replay(self.decode(7, 8), **self.inputs(2))
            return runner
        self.backend.init_cuda_graph_state(self.limits)
        plan = self.backend.init_forward_metadata_out_graph(self.decode(5, 6), in_capture=True)
        inputs, graph = self.inputs(2), RecorderPlatform().new_graph()

        def run() -> None:
            self.backend.init_forward_metadata_in_graph(plan)
            with anyattn.forward_context(self.backend, plan):
                self.body(plan.batch, **inputs)

        graph.capture(run)
        self.backend.init_forward_metadata_out_graph(self.decode(7, 8), captured=plan)
        graph.replay()
        return graph, plan, inputs


@pytest.fixture(autouse=True)
def _nobody_collects() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left(world: World) -> tuple[list[str], int]:
    """Runs eager steps and a replay, drops everything, and names what is still there; out of how many."""
    with torch.no_grad():
        kept = world.steps(), world.replayed()
    host_reads.clear()  # notes of FlashInfer's stand-in
    found = list(_reached(world, kept))
    watched = [(_name(each), weakref.ref(each)) for each in found]
    del found, kept, world
    return [name for name, ref in watched if ref() is not None], len(watched)


def _reached(*roots: object) -> Iterator[Any]:
    """Backends and tensors that hang on `roots`, whatever holds them there."""
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


def _name(each: Any) -> str:
    return f"{each.dtype} {tuple(each.shape)}" if isinstance(each, torch.Tensor) else type(each).__name__


def test_torch_native() -> None:
    still, among = left(World(DENSE, torch.float32, backend="torch_native", page_size=4))
    assert not still
    assert among > 30


CASES: dict[str, tuple[str, anyattn.AttentionSpec, dict[str, Any]]] = {
    "fa3": ("fa3", DENSE, {"backend": "fa3"}),
    "flashinfer": ("flashinfer", DENSE, {"backend": "flashinfer", "page_size": 4}),
    "flashinfer, latent": ("flashinfer_mla", LATENT, {"backend": "flashinfer"}),
    "flashmla": ("flashmla", LATENT, {"prefill": "torch_native", "decode": "flashmla"}),
}


@pytest.mark.parametrize("case", CASES)
def test_vendor_families(case: str) -> None:
    emulator, spec, asked = CASES[case]
    name = emulator.removesuffix("_mla")
    with ExitStack() as stack:
        stack.enter_context(emulating(emulator))
        host = install_recordable(name, latent=spec.mla is not None).host
        still, among = left(World(spec, torch.bfloat16, host=host, **asked))
    assert not still
    assert among > 30


class Owner:
    def double(self, number: int) -> int:
        return 2 * number


def test_a_method_that_is_unheld() -> None:
    owner = Owner()
    gone, call = weakref.ref(owner), unheld(owner.double)
    assert call(4) == 8
    assert unheld(len)("four") == 4
    del owner
    assert gone() is None


def test_what_holds_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As backends did: what a layer's entry kept held the backend that kept the entry."""

    def held(self: AttentionBackend, *_: object) -> PlainCall:
        return lambda *_, _backend=self: None

    monkeypatch.setattr(AttentionBackend, "at_once", held)
    still, _ = left(World(DENSE, torch.float32, backend="torch_native", page_size=4))
    assert "TorchNative" in still
    assert any("torch.uint8" in each for each in still), "the region of its buffers"
