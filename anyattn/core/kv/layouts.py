"""KV layouts as axis strings: one rule to allocate, write and read all of them.

Axes, outermost first: `n` pages, `h` KV heads, `p` rows of a page, `d` head size; a split head size is
`c` chunks of `x`, split rows are `r` chunks of `y`. Names and shapes follow the libraries that read them:
NHD and HND as in FlashInfer's documentation, VECTORISED_5D and PAGED_5D as in AITER's `paged_attention`
and `pa_fwd_asm`, NZ as in torch-npu's fused infer attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anyattn.errors import UnknownNameError

__all__ = ["LAYOUTS", "Axes", "Layout", "layout_named"]

_INNER_BYTES = 16
"""Bytes of the innermost chunk of AITER's layouts."""


@dataclass(frozen=True)
class Axes:
    """Order of the axes of K or of V; `inner` elements in a chunk, 0 = 16 bytes' worth."""

    order: str
    inner: int = 0

    def sizes(self, pages: int, page: int, heads: int, dim: int, itemsize: int) -> dict[str, int]:
        """Length of every axis."""
        inner = self.inner or _INNER_BYTES // itemsize
        return {
            "n": pages, "h": heads, "p": page, "d": dim,
            "c": dim // inner, "x": inner, "r": page // inner, "y": inner,
        }  # fmt: skip

    def fits(self, page: int, dim: int, itemsize: int) -> bool:
        """Chunks divide what they split."""
        inner = self.inner or _INNER_BYTES // itemsize
        return ("c" not in self.order or dim % inner == 0) and ("r" not in self.order or page % inner == 0)

    def shape(self, pages: int, page: int, heads: int, dim: int, itemsize: int) -> tuple[int, ...]:
        """Shape of the storage."""
        sizes = self.sizes(pages, page, heads, dim, itemsize)
        return tuple(sizes[a] for a in self.order)

    def _at(
        self, storage: torch.Tensor, slots: torch.Tensor, page: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """A permuted view, and the index of `slots` in its leading axes; heads and dims remain."""
        rows = "ry" if "r" in self.order else "p"
        dims = "cx" if "c" in self.order else "d"
        view = storage.permute([self.order.index(a) for a in f"n{rows}h{dims}"])
        number, row = slots // page, slots % page
        if rows == "p":
            return view, (number, row)
        inner = view.shape[2]
        return view, (number, row // inner, row % inner)

    def _flat(self, storage: torch.Tensor) -> torch.Tensor | None:
        """`[S, H, D]` where slots are rows: the fast case."""
        return storage.view(-1, *storage.shape[2:]) if self.order == "nphd" else None

    def put(self, storage: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, page: int) -> None:
        """`values [T, H, D]` to `slots [T]`."""
        flat = self._flat(storage)
        if flat is not None:
            flat.index_copy_(0, slots, values)
            return
        view, index = self._at(storage, slots, page)
        view[index] = values.reshape(values.shape[0], *view.shape[len(index) :])

    def get(self, storage: torch.Tensor, slots: torch.Tensor, page: int) -> torch.Tensor:
        """`[n, H, D]` at `slots [n]`."""
        flat = self._flat(storage)
        if flat is not None:
            return flat.index_select(0, slots)
        view, index = self._at(storage, slots, page)
        rows = view[index]
        return rows.flatten(2)


@dataclass(frozen=True)
class Layout:
    """How a pool lays out K and V. `token_rows`: a slot is one row of storage (NHD, HND)."""

    name: str
    key: Axes
    value: Axes
    token_rows: bool = False


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("NHD", Axes("nphd"), Axes("nphd"), token_rows=True),
        Layout("HND", Axes("nhpd"), Axes("nhpd"), token_rows=True),
        Layout("VECTORISED_5D", Axes("nhcpx"), Axes("nhrdy")),
        Layout("PAGED_5D", Axes("nhcpx"), Axes("nhdp")),
        Layout("NZ", Axes("nhcpx", 16), Axes("nhcpx", 16)),
    )
}
"""Layouts that `MHAPool` can hold. Packed ones are opaque: only the writer of their library fills them."""


def layout_named(name: str) -> Layout:
    """The layout of that name. Raises `UnknownNameError`."""
    if name not in LAYOUTS:
        raise UnknownNameError("KV layout", name, LAYOUTS)
    return LAYOUTS[name]
