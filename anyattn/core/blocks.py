"""Block-causal visibility for steps that compute several blocks of a block-diffusion model at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anyattn.core.masks import ExplicitMask
from anyattn.errors import BatchError

__all__ = ["block_causal_mask"]


def block_causal_mask(
    prefix_lens: Sequence[int], extend_lens: Sequence[int], block: int
) -> ExplicitMask | None:
    """Each token sees all of its own block and of those before it; blocks begin at multiples of `block`.

    None where every request's new tokens lie in one block: DLLM_EXTEND without a mask says that, cheaper.

    Raises:
        BatchError: a block below 1 token, or lists of different lengths.
    """
    if block < 1 or len(prefix_lens) != len(extend_lens):
        raise BatchError(
            "blocks of a step",
            asked=f"block {block}, {len(prefix_lens)} prefixes, {len(extend_lens)} extents",
            allowed="block >= 1, one prefix and extent per request",
        )
    spans = list(zip(prefix_lens, extend_lens, strict=True))
    if all(new == 0 or old // block == (old + new - 1) // block for old, new in spans):
        return None
    masks = []
    for old, new in spans:
        end = (torch.arange(old, old + new) // block + 1) * block
        masks.append(torch.arange(old + new)[None, :] < end[:, None])
    return ExplicitMask.from_matrices(masks)
