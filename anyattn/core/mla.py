"""How a step computes latent attention, and when each way pays: data and arithmetic on host lengths.

Absorbed: queries are taken into latent space, all heads attend to one latent head. Materialised: latents are
expanded to keys and values of every head, which makes each query-key pair cheaper (DeepSeek-V2,
arXiv 2405.04434, §2.1 and appendix C).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from anyattn.core.capabilities import CapabilityRow
from anyattn.core.spec import AttentionSpec, MLASpec
from anyattn.errors import ConfigError

__all__ = [
    "MLAExpand",
    "MLAMethod",
    "MLAPolicy",
    "expansion_pays",
    "materialised_spec",
    "methods_of",
    "out_size",
]

MLAExpand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""`latent [n, rank] -> (k_nope [n, Hq, nope], v [n, Hq, v_head_dim])`, in the model's dtype."""


class MLAMethod(Enum):
    """What `plan.mla_method` says. Materialised steps take q `[T, Hq, nope + rope]`, and out has v's size.

    MATERIALISED: no request has a prefix. MATERIALISED_CHUNKED: prefixes are expanded in chunks of bounded
    size, attended without a causal rule, and merged with the causal part over the new tokens.
    """

    ABSORBED = "absorbed"
    MATERIALISED = "materialised"
    MATERIALISED_CHUNKED = "materialised_chunked"

    @property
    def expands(self) -> bool:
        """Keys and values are expanded per head."""
        return self is not MLAMethod.ABSORBED


@dataclass(frozen=True, kw_only=True)
class MLAPolicy:
    """How a backend chooses the method of a step.

    Args:
        method: None = whichever takes fewer operations. ABSORBED or MATERIALISED asks for that one wherever
            it can run (a prefix makes a materialised step chunked; an explicit mask, a window or lengths that
            aren't exact on the host make it absorbed).
        chunk_tokens: prefix tokens of all requests that are expanded at once.

    Raises:
        ConfigError: a chunk below one token, or MATERIALISED_CHUNKED as a wish.
    """

    method: MLAMethod | None = None
    chunk_tokens: int = 8192

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ConfigError("MLAPolicy.chunk_tokens", asked=self.chunk_tokens, allowed=">= 1")
        if self.method is MLAMethod.MATERIALISED_CHUNKED:
            raise ConfigError(
                "MLAPolicy.method",
                asked=self.method.value,
                allowed="None, absorbed, materialised",
                hint="a materialised step is chunked where some request has a prefix",
            )


@functools.cache
def materialised_spec(spec: AttentionSpec) -> AttentionSpec:
    """The plain multi-head layer that a materialised step computes."""
    mla = spec.mla
    assert mla is not None
    return replace(
        spec,
        num_kv_heads=spec.num_q_heads,
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
        mla=None,
    )


def out_size(spec: AttentionSpec, q_size: int) -> int:
    """Size of an output head, from the query's: latent layers are asked in either of two sizes."""
    if spec.mla is None or q_size == spec.head_dim:
        return spec.v_head_dim
    return spec.mla.v_head_dim


def methods_of(row: CapabilityRow, spec: AttentionSpec) -> frozenset[MLAMethod]:
    """ABSORBED and MATERIALISED, as far as the row's head sizes allow them."""
    full = materialised_spec(spec)
    shapes = {
        MLAMethod.ABSORBED: (spec.head_dim, spec.v_head_dim),
        MLAMethod.MATERIALISED: (full.head_dim, full.v_head_dim),
    }
    return frozenset(method for method, shape in shapes.items() if row.head_dims.allows(*shape))


def expansion_pays(mla: MLASpec, prefix_lens: Sequence[int], extend_lens: Sequence[int]) -> bool:
    """True if a materialised step takes fewer multiplications than an absorbed one.

    Per head: a pair costs `rank + rope + rank` absorbed and `nope + rope + v` materialised; expanding a key
    costs `rank * (nope + v)`, which for new tokens is what absorbing the query and projecting the output
    cost. Left over: pairs saved against prefix keys expanded.
    """
    saved_per_pair = 2 * mla.kv_lora_rank - mla.qk_nope_head_dim - mla.v_head_dim
    per_key = mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    pairs = sum(e * (p + (e + 1) / 2) for p, e in zip(prefix_lens, extend_lens, strict=True))
    expanded = sum(p for p, e in zip(prefix_lens, extend_lens, strict=True) if e)
    return pairs * saved_per_pair > expanded * per_key
