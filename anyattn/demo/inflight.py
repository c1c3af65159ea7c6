"""A step that was given to the device, and the way of its tokens back to the host."""

from __future__ import annotations

import torch

from anyattn.demo.scheduler import Step

__all__ = ["InFlight"]


class InFlight:
    """A launched step.

    Attributes:
        step: what it computes.
        tokens: int64 `[N]` on the device, one for each chunk that samples; what a decode step after it reads.
    """

    def __init__(self, step: Step, tokens: torch.Tensor) -> None:
        """The copy to the host is queued now: behind a step that is launched later it would wait for that."""
        self.step, self.tokens = step, tokens
        self._host, self._arrived = tokens, None
        if tokens.device.type == "cuda":
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> list[int]:
        """The tokens, as soon as this step has them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [int(token) for token in self._host.tolist()]
