"""Triton launches in the CPU recorder: one graph serves decode batches of any lengths."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn.core.batch import UpperBound
from anyattn.core.graph.recorder import RecorderPlatform
from anyattn.errors import GraphError
from anyattn.kernels.triton.launch import set_hook
from anyattn.kernels.triton.recording import recording_launches
from anyattn.testing.interpreter import offer_triton

ROWS, CONTEXT, PAGE = 3, 48, 4
SPEC = anyattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=16)
LIMITS = anyattn.Limits(max_requests=ROWS, max_tokens=ROWS, max_context=CONTEXT)


class Served:
    """One layer of `backend` on a pool filled with random KV; inputs at fixed addresses."""

    def __init__(self, backend: str) -> None:
        decision = anyattn.select(
            [SPEC], dtype=torch.float32, device="cpu", backend=backend, page_size=PAGE, limits=LIMITS
        )
        self.pool = anyattn.kv.create_pool(decision, num_slots=ROWS * CONTEXT)
        self.table = anyattn.kv.RequestTable(max_requests=ROWS, max_context=CONTEXT, device="cpu")
        self.backend = anyattn.create_backend(decision, self.pool, self.table)
        self.layer = anyattn.AttentionLayer(SPEC, layer_id=0)
        generator = torch.Generator().manual_seed(3)
        slots = torch.arange(PAGE, PAGE + ROWS * CONTEXT).view(ROWS, CONTEXT)
        self.table.req_to_token[:-1] = slots.flip(0).int()
        self.q = torch.randn(ROWS, 2, 16, generator=generator)
        self.k, self.v = (torch.randn(ROWS, 1, 16, generator=generator) for _ in range(2))
        for cache in (self.pool.key_cache(0), self.pool.value_cache(0)):
            cache.normal_(generator=generator)
        self.out = torch.zeros_like(self.q)

    def batch(self, seq_lens: list[int], host_lens: UpperBound | None = None) -> anyattn.ForwardBatch:
        loc = [int(self.table.req_to_token[r, n - 1]) for r, n in enumerate(seq_lens)]
        return anyattn.ForwardBatch.decode(list(range(ROWS)), seq_lens, loc, host_lens=host_lens)

    def forward(self, plan: anyattn.Plan) -> None:
        with anyattn.forward_context(self.backend, plan):
            self.layer(self.q, self.k, self.v, plan.batch, out=self.out)


@pytest.fixture(autouse=True, scope="module")
def _on_this_cpu() -> None:
    offer_triton()


def test_one_graph_for_all_lengths() -> None:
    """Grids come from the bound; lengths, slots and tables are read from buffers at replay."""
    served, judge = Served("triton"), Served("torch_native")
    served.backend.init_cuda_graph_state(LIMITS)
    bound = UpperBound(CONTEXT, 1)
    plan = served.backend.init_forward_metadata_out_graph(served.batch([1, 1, 1], bound), in_capture=True)
    assert plan.max_kv_len == CONTEXT

    def body() -> None:
        served.backend.init_forward_metadata_in_graph(plan)
        served.forward(plan)

    graph = RecorderPlatform(poison=True, seams=[recording_launches]).new_graph()
    graph.capture(body)
    launches = [name for name in graph.operations if name.startswith("triton kernel")]
    first = ("metadata_kernel", "kv_write_kernel", "decode_kernel")
    assert launches[:3] == [f"triton kernel {name}" for name in first], "one launch prepares the step"
    assert set_hook(None) is None, "the seam is free again"
    for lengths in ([1, 7, 48], [33, 16, 2], [48, 48, 48], [1, 1, 1]):
        served.q.normal_()
        served.out.fill_(torch.nan)
        served.backend.init_forward_metadata_out_graph(served.batch(lengths, bound))
        graph.replay()
        for name in ("q", "k", "v"):
            getattr(judge, name).copy_(getattr(served, name))
        for mine, its in zip(served.pool.caches(0), judge.pool.caches(0), strict=True):
            its.copy_(mine)
        judge.forward(judge.backend.init_forward_metadata(judge.batch(lengths)))
        assert torch.allclose(served.out, judge.out, atol=1e-5), lengths


def test_launches_past_the_seam_are_refused() -> None:
    """Without the seam the launch would be missing from the graph, and nobody would notice."""
    served = Served("triton")
    plan = served.backend.init_forward_metadata_out_graph(served.batch([5, 6, 7]))
    with pytest.raises(GraphError, match="through record_call"):
        RecorderPlatform().new_graph().capture(lambda: served.backend.init_forward_metadata_in_graph(plan))
