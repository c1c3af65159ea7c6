"""`RequestTable`: which slot holds which token of which request."""

from __future__ import annotations

import torch

from anyattn.core.arguments import check_whole
from anyattn.core.ids import IdKind
from anyattn.errors import PoolError

__all__ = ["RequestTable"]


class RequestTable:
    """Token slots of each request, in sequence order.

    Attributes:
        req_to_token: int32 `[R + 1, max_context]`; row r, column p = slot of token p of request r.
            The last row (`padding_row`) is all zero: padded rows of a batch name it.
        ids: what the numbers are; `VirtualTable` holds virtual ones.
        encoder_to_token: int32 `[R + 1, max_encoder]` for cross-attention, or None.
    """

    ids: IdKind = IdKind.PHYSICAL

    def __init__(
        self,
        *,
        max_requests: int,
        max_context: int,
        device: torch.device | str = "cpu",
        max_encoder: int = 0,
    ) -> None:
        """Raises `PoolError` for sizes below 1, and for a device that isn't there or has no room."""
        hint = "size the table by the Limits given to select()"
        for name, size, least in (
            ("max_requests", max_requests, 1),
            ("max_context", max_context, 1),
            ("max_encoder", max_encoder, 0),
        ):
            check_whole(f"request table: {name}", size, least, hint=hint, error=PoolError)
        self.max_requests, self.max_context, self.max_encoder = max_requests, max_context, max_encoder
        rows = max_requests + 1
        try:
            self.device = torch.device(device)
            self.req_to_token = torch.zeros(rows, max_context, dtype=torch.int32, device=self.device)
            self.encoder_to_token = (
                torch.zeros(rows, max_encoder, dtype=torch.int32, device=self.device) if max_encoder else None
            )
        except (RuntimeError, AssertionError) as error:  # no such device, or no memory on it
            reason = str(error).partition("\n")[0]
            raise PoolError(
                f"the request table can't be made: {reason}",
                asked=f"[{rows}, {max_context}] on {device}",
                allowed="the device of the pool, as far as its memory goes",
                hint="RequestTable(device=pool.device)",
            ) from error

    @property
    def padding_row(self) -> int:
        """Row that padded requests name."""
        return self.max_requests
