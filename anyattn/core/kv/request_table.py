"""`RequestTable`: which slot holds which token of which request."""

from __future__ import annotations

import torch

from anyattn.errors import PoolError

__all__ = ["RequestTable"]


class RequestTable:
    """Token slots of each request, in sequence order.

    Attributes:
        req_to_token: int32 `[R + 1, max_context]`; row r, column p = slot of token p of request r.
            The last row (`padding_row`) is all zero: padded rows of a batch name it.
        encoder_to_token: int32 `[R + 1, max_encoder]` for cross-attention, or None.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_context: int,
        device: torch.device | str = "cpu",
        max_encoder: int = 0,
    ) -> None:
        """Raises `PoolError` for sizes below 1."""
        if max_requests < 1 or max_context < 1:
            raise PoolError(
                "request table size (max_requests, max_context)",
                asked=(max_requests, max_context),
                allowed=">= 1 each",
                hint="size it by the Limits given to select()",
            )
        self.device = torch.device(device)
        self.max_requests, self.max_context, self.max_encoder = max_requests, max_context, max_encoder
        rows = max_requests + 1
        self.req_to_token = torch.zeros(rows, max_context, dtype=torch.int32, device=self.device)
        self.encoder_to_token = (
            torch.zeros(rows, max_encoder, dtype=torch.int32, device=self.device) if max_encoder else None
        )

    @property
    def padding_row(self) -> int:
        """Row that padded requests name."""
        return self.max_requests
