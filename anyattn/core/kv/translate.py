"""Who translates slot numbers, verified once at start-up: every read exactly once, ids of one kind only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from anyattn.core.ids import IdKind, VirtualIds
from anyattn.core.kv.pools.base import KVPool
from anyattn.core.kv.request_table import RequestTable
from anyattn.core.plan import TableForm, TableKind
from anyattn.errors import BackendBuildError, PoolError

__all__ = ["NamedForm", "Reads", "VirtualTable", "bind_and_verify_backends"]


class VirtualTable(RequestTable):
    """A request table of virtual ids, for a `UnifiedPool`. Rows are filled by `assign`."""

    ids = IdKind.VIRTUAL

    def assign(self, row: int, start: int, ids: VirtualIds) -> None:
        """The tokens from position `start` of a row have these ids. Raises `PoolError` for raw numbers."""
        if not isinstance(ids, VirtualIds):
            raise PoolError("a table of virtual ids", asked=type(ids).__name__, allowed="VirtualIds")
        if not 0 <= start <= start + len(ids) <= self.max_context:
            span = f"{start} .. {start + len(ids)}"
            raise PoolError("positions of a row", asked=span, allowed=f"0 .. {self.max_context}")
        self.req_to_token[row, start : start + len(ids)] = ids.values.to(self.req_to_token)


class NamedForm(Protocol):
    """The part of a `BackendConfig` that matters here."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def form(self) -> TableForm:
        """The table that its kernels read."""


class Reads(Protocol):
    """What a backend says about its reads of a translated pool."""

    translates_reads: bool

    @property
    def config(self) -> NamedForm:
        """Its name, and the table that its kernels read."""


def bind_and_verify_backends(backends: Iterable[Reads], pool: KVPool, table: RequestTable) -> None:
    """Table and pool speak of the same ids, and every backend's reads are translated exactly once.

    The compiler translates lists (TOKEN_CSR, PAGE_CSR, BLOCK_TABLE). A REQUEST_TABLE kernel reads the
    request table itself, so it has to translate (`KVPool.slot_map`), and no other may.

    Raises:
        PoolError: virtual ids on a pool of physical slots, or the reverse.
        BackendBuildError: reads that nobody would translate, or that would be translated twice.
    """
    if table.ids is not pool.ids:
        raise PoolError(
            "request table and pool speak of different ids",
            asked=f"a table of {table.ids.value} ids",
            allowed=f"{pool.ids.value} ids",
            hint="VirtualTable goes with UnifiedPool, RequestTable with all others",
        )
    translated = pool.ids is IdKind.VIRTUAL or bool(pool.full_to_window)
    for backend in backends if translated else ():
        itself = backend.config.form.kind is TableKind.REQUEST_TABLE
        if itself is not backend.translates_reads:
            how = "by nobody" if itself else "twice: by the compiler and in its kernels"
            raise BackendBuildError(
                f"{backend.config.name} would read this pool's slots translated {how}",
                asked=type(pool).__name__,
                allowed="a pool whose slots are those of the request table",
                hint="create_pool without window_slots and num_ids, or choose another backend",
            )
