"""Split prefill, block diffusion, two-sided and encoder-decoder attention, through the public API."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn.core.blocks import block_causal_mask
from anyattn.errors import BatchError, FeatureError
from anyattn.testing.mode_runs import MODE_RUNS, cross_attention
from anyattn.testing.window_runs import spec

PLACES = [
    ("torch_native", "cpu"),
    pytest.param(
        ("triton", "cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
    ),
]


@pytest.mark.parametrize("run", MODE_RUNS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("place", PLACES, ids=lambda p: p[0])
def test_every_step_agrees_with_the_oracle(place: tuple[str, str], page_size: int, run: str) -> None:
    backend, device = place
    assert MODE_RUNS[run](backend=backend, device=device, page_size=page_size) < 2e-5


def test_a_split_prefill_survives_the_steps_between_in_stable_buffers() -> None:
    assert MODE_RUNS["split_prefill"](buffers=True) < 2e-5


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("place", PLACES, ids=lambda p: p[0])
def test_cross_attention_at_any_page_size(place: tuple[str, str], layout: str, page_size: int) -> None:
    backend, device = place
    assert cross_attention(page_size=page_size, layout=layout, backend=backend, device=device) < 2e-5


def test_block_causal_mask() -> None:
    assert block_causal_mask([8, 3], [8, 5], 8) is None
    mask = block_causal_mask([2], [4], 4)
    assert mask is not None
    cells = mask.cells.view(4, 6).int().tolist()
    assert cells == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0], [1] * 6, [1] * 6]
    with pytest.raises(BatchError):
        block_causal_mask([0], [1, 2], 4)
    with pytest.raises(BatchError):
        block_causal_mask([0], [1], 0)


def test_a_block_is_refused_where_two_sided_attention_is_not_declared() -> None:
    decision = anyattn.select([spec(None)], dtype=torch.float32, device="cpu", backend="torch_native")
    pool = anyattn.kv.create_pool(decision, num_slots=64)
    table = anyattn.kv.RequestTable(max_requests=2, max_context=32)
    backend = anyattn.create_backend(decision, pool, table)
    backend._features[anyattn.ForwardMode.DLLM_EXTEND] -= {anyattn.Feature.BIDIRECTIONAL}
    batch = anyattn.ForwardBatch.extend([0], [0], [4], [16, 17, 18, 19], mode=anyattn.ForwardMode.DLLM_EXTEND)
    with pytest.raises(FeatureError, match="a block whose tokens see each other"):
        backend.init_forward_metadata(batch)
