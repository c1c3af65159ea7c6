"""Pages and layouts that rows can share: which kernel page a row reads out of a pool page."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from anyattn.core.capabilities import CapabilityRow, FormSpec, PageSizes

__all__ = ["PAGES", "TOKEN_MAJOR", "describe_pages", "kernel_page", "page_candidates", "page_order", "splits"]

PAGES = (1, 16, 32, 64, 128, 256)
"""Pool pages that are always considered; rows add those that they list."""

TOKEN_MAJOR = frozenset({"NHD"})
"""Layouts `[N, P, ...]` with the token axis outermost in a page: such a page splits into smaller ones by a
view. In all others (`HND`: `[N, Hkv, P, D]`) a kernel that reads pages must read the pool's."""

_TOKEN_TABLES = ("token_csr", "request_table")
"""Forms that list slots, not pages: their kernels find a slot in any layout that their row names."""


@functools.cache
def _kernel_page(pages: PageSizes, form: FormSpec, pool_page: int, layout: str) -> int | None:
    fixed = 1 if form.kind == "token_csr" else form.kernel_page
    page = pages.kernel_page(pool_page) if not fixed else fixed if pool_page % fixed == 0 else None
    if page is None or not pages.allows(page):
        return None
    whole = page == pool_page or layout in TOKEN_MAJOR or form.kind in _TOKEN_TABLES
    return page if whole else None


def kernel_page(row: CapabilityRow, pool_page: int, layout: str) -> int | None:
    """The page that the row's kernel reads from a pool with this page and layout, or None if it can't."""
    return _kernel_page(row.pages, row.form, pool_page, layout) if layout in row.layouts else None


def describe_pages(row: CapabilityRow) -> str:
    """Pool pages that the row takes, in words."""
    if row.form.kind == "token_csr":
        return "any"
    return f"multiples of {row.form.kernel_page}" if row.form.kernel_page else str(row.pages)


def splits(row: CapabilityRow, pool_page: int, layout: str) -> bool:
    """The kernel reads pool pages in pieces, so its table is longer than the pool's (token tables aside)."""
    return kernel_page(row, pool_page, layout) not in (None, 1, pool_page)


def page_order(platform: str) -> tuple[int, ...]:
    """Preferred pool pages, best first.

    Accelerators: 64, since TMA reads of paged K/V want 64 rows or more (Triton prefill on an H200 reaches
    0.83 of FA3 at page 64, 0.78 at page 16) and FA3 doesn't care. CPU: 16, which shares prefixes in
    finer steps and costs nothing there.
    """
    return (16, 32, 64, 128, 256, 1) if platform == "cpu" else (64, 128, 32, 16, 256, 1)


def page_candidates(rows: Iterable[CapabilityRow], platform: str, asked: int | None) -> Sequence[int]:
    """Pool pages to try, best first: the asked one alone, else the usual ones and those that rows list."""
    if asked is not None:
        return (asked,)
    listed: set[int] = set()
    for row in rows:
        listed |= {*row.pages.sizes, row.pages.multiple_of, row.form.kernel_page}
    usual = page_order(platform)
    return (*usual, *sorted(listed.difference(usual, {0})))
