"""Host arrays that are on the device, too: for libraries that would upload them once more."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Mirrored"]


class Mirrored(torch.Tensor):
    """A host tensor that is its twin on the twin's device: `to(device)` copies nothing.

    Whatever else is done with it is done with the host's values, so that a library which asks for more than
    `to` is right, too, only slower. The twin must hold the same values by the time that a kernel reads it.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    host: torch.Tensor
    twin: torch.Tensor

    @staticmethod
    def of(host: torch.Tensor, twin: torch.Tensor) -> Mirrored:
        """`host` as it is, with `twin`, which has its shape and dtype."""
        made = host.as_subclass(Mirrored)
        made.host, made.twin = host, twin
        return made

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `Tensor.to`; the twin where its device is asked for, and the host's own tensor for `"cpu"`."""
        if len(args) == 1 and kwargs.keys() <= _PLAIN:
            if args[0] == "cpu":
                return self.host
            if args[0] == self.twin.device:
                return self.twin
        return self.host.to(*args, **kwargs)


_PLAIN = frozenset({"non_blocking"})
