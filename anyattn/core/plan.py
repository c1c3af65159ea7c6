"""What one step compiles to: tables in the forms that kernels read, and the plan that carries them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.groups import Space, TableGroup
from anyattn.core.masks import TreeMaskMode
from anyattn.core.mla import MLAMethod
from anyattn.core.strategy import Strategy

if TYPE_CHECKING:
    from anyattn.core.metadata.again import Again
    from anyattn.core.metadata.buffers import StepStorage
    from anyattn.core.metadata.upload import UploadLayout
    from anyattn.core.mla_keys import MLAKeys

__all__ = ["HostTable", "Plan", "PlanKey", "Strategy", "Table", "TableForm", "TableKind"]


class TableKind(Enum):
    """Shape of a KV table.

    TOKEN_CSR / PAGE_CSR: `indptr [B + 1]` and flat `indices` of token slots / page numbers.
    BLOCK_TABLE: page numbers `[B, width]`. REQUEST_TABLE: no table; the kernel reads `req_to_token`
    through `req_pool_indices`.
    """

    TOKEN_CSR = "token_csr"
    PAGE_CSR = "page_csr"
    BLOCK_TABLE = "block_table"
    REQUEST_TABLE = "request_table"


@dataclass(frozen=True)
class TableForm:
    """A table as one kernel reads it. Its granularity is part of the type.

    Attributes:
        kernel_page: tokens an entry stands for (1 = token slots). Divides the pool's page.
        fill: entry of unused cells.
        width_multiple: BLOCK_TABLE width is rounded up to this.
        index_slack: extra `fill` entries behind the CSR indices (some kernels read past the end).
    """

    kind: TableKind
    kernel_page: int = 1
    fill: int = 0
    width_multiple: int = 1
    index_slack: int = 0
    index_dtype: torch.dtype = torch.int32

    @property
    def granularity(self) -> str:
        """`token` or `page`."""
        return "token" if self.kernel_page == 1 else "page"


@dataclass(frozen=True, eq=False)
class HostTable:
    """Host mirrors of a table's offsets, int32 CPU tensors; present when lengths are exact."""

    indptr: torch.Tensor
    kv_lens: torch.Tensor


@dataclass(eq=False)
class Table:
    """One group's table in one form.

    Attributes:
        kv_start: int32 `[B]`, position of the first token that the table lists (trimmed windows;
            page-aligned for page granularity).
        kv_lens: int32 `[B]`, tokens listed: `seq_lens - kv_start`.
        indptr, indices: CSR forms. `last_page_len`: int32 `[B]`, tokens in each last page.
        block_table: `[B, width]`.
        mirrors: makes `host` where lengths are exact.
    """

    form: TableForm
    kv_start: torch.Tensor
    kv_lens: torch.Tensor
    indptr: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    last_page_len: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    mirrors: Callable[[], HostTable] | None = None

    @cached_property
    def host(self) -> HostTable | None:
        """Host mirrors where lengths are exact, computed when first read: few kernels plan on the host."""
        return None if self.mirrors is None else self.mirrors()

    def remirror(self, mirrors: Callable[[], HostTable] | None) -> None:
        """Host mirrors of another step in the same tensors."""
        self.mirrors = mirrors
        self.__dict__.pop("host", None)

    @property
    def csr(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(indptr, indices)` of a CSR form."""
        assert self.indptr is not None
        assert self.indices is not None
        return self.indptr, self.indices

    @property
    def blocks(self) -> torch.Tensor:
        """`block_table` of a BLOCK_TABLE form."""
        assert self.block_table is not None
        return self.block_table


class PlanKey(NamedTuple):
    """The shape that a plan was made for. `serial` is the batch's identity, `owner` the backend's."""

    serial: int
    owner: int
    mode: ForwardMode
    num_requests: int
    num_tokens: int


@dataclass(eq=False)
class Plan:
    """One compiled step. Several may be alive at once; none is changed by making another.

    Attributes:
        req_pool_indices: int64 `[B]`; seq_lens, prefix_lens, extend_lens: int32 `[B]`;
        query_offsets: int32 `[B + 1]`; positions: int64 `[T]`; all on the pool's device.
        write_locs: slots that new KV goes to, int64 `[T]`, per space; window_locs: the same in each window
            pool, by window size (see `write_loc`); listed_loc: as given, in the request table's numbers.
        max_q_len, max_kv_len: host bounds (exact where host lengths are).
        tables: one table per table group, in the backend's form.
        mask_cells, mask_indptr: explicit mask on the device, or None; offsets also on the host where they
            are known there. mask_mode: its form, one that the backend reads.
        mla_method: how latent layers run in this step, None without any; mla_keys: what a materialised step
            expands.
        private: library objects of the backend.
        children: plans of a wrapper's children, in their order (None = not planned this step).
        storage: where its tensors come from; uploaded: where in it the vectors of later batches go; refill:
            how a filler fills the same tables once more, its own. again: how later batches with so many
            padded requests get there (`metadata.again`).
    """

    key: PlanKey
    batch: ForwardBatch
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    prefix_lens: torch.Tensor
    extend_lens: torch.Tensor
    query_offsets: torch.Tensor
    positions: torch.Tensor
    write_locs: dict[Space, torch.Tensor]
    max_q_len: int
    max_kv_len: int
    tables: dict[TableGroup, Table] = field(default_factory=dict)
    mask_cells: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None
    host_mask_indptr: list[int] | None = None
    mask_mode: TreeMaskMode | None = None
    encoder_lens: torch.Tensor | None = None
    strategy: Strategy = Strategy.PAGED
    mla_method: MLAMethod | None = None
    mla_keys: MLAKeys | None = None
    private: Any = None
    children: Sequence[Plan | None] = ()
    window_locs: dict[int, torch.Tensor] = field(default_factory=dict)
    listed_loc: torch.Tensor | None = None
    storage: StepStorage | None = None
    uploaded: UploadLayout | None = None
    refill: Any = None
    again: dict[int, Again] = field(default_factory=dict)

    @property
    def stable(self) -> bool:
        """Its tensors live at addresses that later steps use again: a graph may have recorded them."""
        return self.storage is not None and self.storage.stable

    def retarget(self, batch: ForwardBatch) -> None:
        """From now on this plan stands for `batch`, of the same shape: values change, tensors stay."""
        key = self.key
        self.batch = batch
        self.key = tuple.__new__(PlanKey, (batch.serial, *key[1:]))
        made = self.__dict__
        made.pop("host_seq_lens", None)
        made.pop("host_extend_lens", None)

    @cached_property
    def host_seq_lens(self) -> list[int] | None:
        """Exact lengths on the host, or None."""
        return None if self.batch.exact is None else self.batch.exact.seq_lens.tolist()

    @cached_property
    def host_extend_lens(self) -> list[int] | None:
        """Exact numbers of new tokens on the host, or None."""
        return None if self.batch.exact is None else self.batch.exact.extend_lens.tolist()

    def write_loc(self, group: TableGroup) -> torch.Tensor | None:
        """Slots int64 `[T]` that new KV of a group's layers goes to, in their own pool; None = none given."""
        if group.space is Space.WINDOW:
            assert group.window is not None
            return self.window_locs.get(group.window)
        return self.write_locs.get(group.space)
