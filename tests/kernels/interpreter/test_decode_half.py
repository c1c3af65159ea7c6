"""Queries that are brought to [-1, 1] for a product in float16, and brought back in the logits."""

import pytest
import torch

from anyattn.kernels.triton import decode_launch
from anyattn.kernels.triton.attention import Cache, Heads, Variant
from anyattn.kernels.triton.configs import Decode


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("size", [1.0, 3000.0, 0.0])
def test_rows_of_any_size(size: float, cap: float | None) -> None:
    """float16 stands in for fp8, whose elementwise operations the interpreter gets wrong."""
    torch.manual_seed(0)
    heads, length = Heads(4, 2, 16, 16), 50
    k, v = (torch.randn(5, 16, 2, 16).half() for _ in range(2))
    q, out = torch.randn(1, 4, 16), torch.zeros(1, 4, 16, dtype=torch.float16)
    q = (q * torch.tensor([1.0, 0.01, 2.0, 1.0])[None, :, None] * size).half()
    table, one = torch.arange(16, 80, dtype=torch.int32)[None], torch.ones(1)
    scale = 0.25 / max(1.0, size)
    lens = torch.tensor([length], dtype=torch.int32)
    tiles = Decode(16, 4, 1, 2, 1, True, half=True)
    step = decode_launch.DecodeStep.of(
        table, torch.zeros(1, dtype=torch.int64), lens * 0, lens, None, 16, heads, tiles
    )
    decode_launch.fill_ranges(step)
    cache = Cache.of(k, v, "NHD", one, one, False)
    decode_launch.decode(q, cache, step, heads, Variant(scale, cap), out, None)
    keys, values = (x.flatten(0, 1)[16 : 16 + length].float().repeat_interleave(2, 1) for x in (k, v))
    logits = torch.einsum("hd,nhd->hn", q[0].float(), keys) * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    wanted = torch.einsum("hn,nhd->hd", torch.softmax(logits, -1), values)
    assert torch.allclose(out[0].float(), wanted, atol=2e-3)
