"""The metadata compiler: a `ForwardBatch` becomes the tables that one kernel family reads.

Two halves, the same for eager, capture and replay: `prepare` does host work (checks, bounds, one upload,
storage), `fill` does device work of static shape (offsets, positions, tables).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from anyattn import env
from anyattn.core.batch import ForwardBatch
from anyattn.core.capturing import is_capturing
from anyattn.core.groups import GroupSet, Space, TableGroup
from anyattn.core.kv.pools.base import KVPool
from anyattn.core.kv.request_table import RequestTable
from anyattn.core.masks import TreeMaskMode
from anyattn.core.metadata import tables
from anyattn.core.metadata.again import again_for
from anyattn.core.metadata.buffers import FreshStorage, StepBuffers, StepStorage
from anyattn.core.metadata.checks import check_host, check_same_shape, check_values
from anyattn.core.metadata.extent import csr_entries, max_kv_len, max_q_len, table_extent, table_mirrors
from anyattn.core.metadata.masks import fill_mask, prepare_mask
from anyattn.core.metadata.pack import Pack, Packs
from anyattn.core.metadata.slots import RowCheck, SlotCheck
from anyattn.core.metadata.upload import Uploader, UploadLayout
from anyattn.core.metadata.vectors import gathered, layout_for, vectors_of
from anyattn.core.metadata.windows import (
    check_ids,
    check_windows,
    fill_windows,
    prepare_windows,
    translates,
)
from anyattn.core.plan import Plan, PlanKey, Table, TableForm, TableKind
from anyattn.core.spec import AttentionKind
from anyattn.core.strategy import Strategy, choose_strategy
from anyattn.errors import BatchError

__all__ = ["MetadataCompiler"]


class MetadataCompiler:
    """Compiles steps for one backend: one table per table group, in the form that it declares."""

    def __init__(
        self,
        groups: GroupSet,
        form: TableForm,
        pool: KVPool,
        table: RequestTable,
        owner: int,
        filler: Callable[[Plan], None] | None = None,
    ) -> None:
        """`filler` replaces the device half (`fill`); it must give the same bits. Adapters may set it later.

        Raises:
            BatchError: the kernel's page doesn't divide the pool's.
        """
        if pool.page_size % form.kernel_page:
            raise BatchError(
                "kernel page must divide the pool's page", asked=form.kernel_page, allowed=pool.page_size
            )
        self.form, self.pool, self.table, self.owner = form, pool, table, owner
        self.filler = filler
        self.device = pool.device
        self.checks = env.read("ANYATTN_CHECKS")
        self._any_slot_is_writable = type(pool).check_writable is KVPool.check_writable
        self._slots = SlotCheck(pool.page_size, pool.listed_slots)
        self._rows = RowCheck(table.max_requests)
        self.uploader, self._fresh = Uploader(self.device), FreshStorage(self.device)
        self._groups = tuple(g for g in groups.table_groups if g.kind is not AttentionKind.ENCODER_ONLY)
        self._translates = translates(pool, self._groups)
        self._packs = Packs(self._slots, table.max_requests, table.max_context, pool.listed_slots)

    def prepare(
        self,
        batch: ForwardBatch,
        buffers: StepBuffers | None = None,
        *,
        tree_mask: TreeMaskMode = TreeMaskMode.FULL_MASK,
        strategies: Sequence[Strategy] = (Strategy.PAGED,),
        in_capture: bool = False,
    ) -> Plan:
        """Host half: checks, bounds, upload and storage. With `buffers`, every tensor lives in them.

        `tree_mask`: the form that the backend reads (`Traits.tree_mask`). `strategies`: those it offers.
        `in_capture`: `max_kv_len` bounds every later step, not this one.

        Raises:
            BatchError: whatever `checks.check_host` finds, or a batch that doesn't fit the buffers.
        """
        self._check_host(batch)
        storage: StepStorage = self._fresh if buffers is None else buffers
        take = storage.take
        given = self._upload(batch, storage)
        num_requests, num_tokens = batch.batch_size, batch.num_tokens
        positions = given.get("positions")
        if positions is None:
            positions = take("positions", (num_tokens,), torch.int64)
        plan = Plan(
            key=PlanKey(batch.serial, self.owner, batch.forward_mode, num_requests, num_tokens),
            batch=batch,
            req_pool_indices=given["req_pool_indices"],
            seq_lens=given["seq_lens"],
            extend_lens=given["extend_lens"],
            prefix_lens=take("prefix_lens", (num_requests,), torch.int32),
            query_offsets=take("query_offsets", (num_requests + 1,), torch.int32),
            positions=positions,
            write_locs={space: given[name] for space, name in _WRITES if name in given},
            max_q_len=max_q_len(batch),
            max_kv_len=self.table.max_context if in_capture else max_kv_len(batch, self.table.max_context),
            strategy=choose_strategy(batch, strategies),
            storage=storage,
        )
        plan.encoder_lens = given.get("encoder_lens")
        prepare_mask(plan, tree_mask, storage, self.device)
        prepare_windows(plan, self.pool, storage)
        for index, group in enumerate(self._groups):
            if plan.strategy is not Strategy.RAGGED or group.space is Space.ENCODER:
                plan.tables[group] = self._new_table(index, group, plan, storage)
        return plan

    def refresh(
        self, plan: Plan, batch: ForwardBatch, *, tree_mask: TreeMaskMode = TreeMaskMode.FULL_MASK
    ) -> None:
        """Host half for a replay: `batch` at the addresses that `plan` was captured with; no allocation.

        Raises:
            BatchError: as `prepare`. GraphError: a batch of another shape than the captured one.
        """
        pack = self._packed(batch)
        if pack is None:
            self._check_host(batch)
        check_same_shape(plan, batch)
        assert plan.storage is not None
        self._upload_again(batch, plan, plan.storage, pack)
        plan.retarget(batch)
        self._remember(plan, pack)
        if batch.mask is not None:
            prepare_mask(plan, tree_mask, plan.storage, self.device)
        prefix_only = plan.strategy is Strategy.RAGGED_MERGE
        for group, table in plan.tables.items():
            table.remirror(table_mirrors(batch, group, table.form, self.table, prefix_only=prefix_only))

    def renew(self, plan: Plan, batch: ForwardBatch) -> None:
        """`refresh` for a plan of an eager step that `fits`: its bounds become the batch's, too.

        Raises:
            BatchError: as `prepare`.
        """
        again = plan.again.get(batch.num_padding_requests)
        if again is None or not again(plan, batch):
            layout, pack = plan.uploaded, self._packed(batch)
            assert layout is not None
            if pack is None:
                self._check_host(batch)
                self.uploader.send_again(layout, layout.read(batch))
            else:
                self._send(layout, pack)
            plan.retarget(batch)
            self._remember(plan, pack)
            for group, table in plan.tables.items():
                table.remirror(table_mirrors(batch, group, table.form, self.table))
        plan.max_kv_len = max_kv_len(batch, self.table.max_context)

    def fit(self, batch: ForwardBatch) -> tuple[object, ...] | None:
        """What the tensors of a plain plan (`eager.layout_of`) follow from: in that of one batch `renew`
        leaves what `prepare` makes for another with the same. None: not all is on the host.
        """
        rows, loc, positions = batch.req_pool_indices, batch.out_cache_loc, batch.positions
        if batch.whole is None:
            if not (rows.is_cpu and batch.seq_lens.is_cpu and batch.extend_seq_lens.is_cpu):
                return None
            if not ((loc is None or loc.is_cpu) and (positions is None or positions.is_cpu)):
                return None
        room, form = 0, self.form
        if form.kind is TableKind.BLOCK_TABLE:
            room = _width(-(-max_kv_len(batch, self.table.max_context) // form.kernel_page), form)
        elif form.kind is not TableKind.REQUEST_TABLE:
            room = csr_entries(batch, form.kernel_page, self.table.max_context)
        return rows.shape[0], batch.num_tokens, loc is None, positions is None, room

    def fill(self, plan: Plan) -> None:  # anyattn: in-graph
        """Device half: static shapes, no host sync; may be recorded in a graph."""
        if self.filler is None or plan.strategy is Strategy.RAGGED_MERGE:
            self._fill_tables(plan)
        else:
            self.filler(plan)
        if plan.mask_mode is not None:
            fill_mask(plan)
        if self._translates:
            fill_windows(plan, self.pool)

    def _fill_tables(self, plan: Plan) -> None:
        torch.sub(plan.seq_lens, plan.extend_lens, out=plan.prefix_lens)
        tables.fill_offsets(plan.extend_lens, plan.query_offsets)
        if plan.batch.positions is None:
            tables.fill_positions(plan.query_offsets, plan.prefix_lens, plan.positions)
        for group, table in plan.tables.items():
            seq, prefix, source = plan.seq_lens, plan.prefix_lens, self.table.req_to_token
            if group.space is Space.ENCODER:
                assert plan.encoder_lens is not None
                assert self.table.encoder_to_token is not None
                seq = prefix = plan.encoder_lens
                source = self.table.encoder_to_token
            elif plan.strategy is Strategy.RAGGED_MERGE:
                seq = prefix
            tables.fill_table(table, source, plan.req_pool_indices, seq, prefix, group.window)

    def check(self, plan: Plan) -> None:
        """Reads device values when checks=full; a no-op otherwise and while a graph is captured."""
        if self.checks == "full" and not is_capturing(self.device):
            check_values(plan, self.table, self.pool.page_size, self.pool.listed_slots)
            check_windows(plan, self.table, self.pool)

    def _check_host(self, batch: ForwardBatch) -> None:
        if batch.ids is not self.pool.ids:
            check_ids(batch, self.pool)
        if self.checks == "off":
            return
        check_host(batch, self.table, self._rows, self._slots)
        if self._any_slot_is_writable:
            return
        loc = batch.out_cache_loc
        if loc is not None and loc.is_cpu:
            self.pool.check_writable(loc[: batch.num_tokens - batch.num_padding_tokens])

    def _upload(self, batch: ForwardBatch, storage: StepStorage) -> dict[str, torch.Tensor]:
        """The batch's vectors in the plan's storage, by name: a plan never aliases the caller's tensors."""
        fields, values = vectors_of(batch)
        on_host = [v.is_cpu for v in values]
        if all(on_host):
            region, vectors = storage.packed(fields)
            parts = [(at, v, f[2]) for (at, _), v, f in zip(vectors, values, fields, strict=True)]
            self.uploader.send(region, parts)
            return {f[0]: view for f, (_, view) in zip(fields, vectors, strict=True)}
        return gathered(self.uploader, fields, values, on_host, storage)

    def _packed(self, batch: ForwardBatch) -> Pack | None:
        """The batch's vectors as one, found as `_check_host` wants them; None: nothing is known of them."""
        if not self._any_slot_is_writable:
            return None
        if batch.ids is not self.pool.ids:
            check_ids(batch, self.pool)
        return self._packs.taken(batch, check=self.checks != "off")

    def _send(self, layout: UploadLayout, pack: Pack) -> None:
        self.uploader.send_again(layout, pack.views, pack.wide)
        self._packs.give_back(pack)

    def _upload_again(self, batch: ForwardBatch, plan: Plan, storage: StepStorage, pack: Pack | None) -> None:
        """`_upload` to where the captured batch's vectors went: the same fields, of the same lengths."""
        layout = plan.uploaded
        if layout is None:
            fields, _ = vectors_of(batch)
            region, vectors = storage.packed(fields)
            layout = plan.uploaded = layout_for(region, fields, vectors)
        if pack is not None:
            self._send(layout, pack)
            return
        values = layout.read(batch)
        for value in values:
            if not value.is_cpu:
                self._upload(batch, storage)
                return
        self.uploader.send_again(layout, values)

    def _remember(self, plan: Plan, pack: Pack | None) -> None:
        """How the plan's batch got there from `pack`."""
        if pack is not None:
            made = again_for(plan, pack, self.uploader, check=self.checks != "off")
            if made is not None:
                plan.again[plan.batch.num_padding_requests] = made

    def _new_table(self, index: int, group: TableGroup, plan: Plan, storage: StepStorage) -> Table:
        form, rows, take = self.form, plan.key.num_requests, storage.take
        prefix_only = plan.strategy is Strategy.RAGGED_MERGE
        extent = table_extent(
            plan.batch, group, form, self.table, prefix_only=prefix_only, largest=storage.stable
        )
        table = Table(
            form,
            kv_start=take(f"kv_start.{index}", (rows,), torch.int32),
            kv_lens=take(f"kv_lens.{index}", (rows,), torch.int32),
            mirrors=extent.mirrors,
        )
        if form.kind is TableKind.BLOCK_TABLE:
            shape = (rows, _width(extent.widest, form))
            table.block_table = take(f"block_table.{index}", shape, form.index_dtype)
        elif form.kind is not TableKind.REQUEST_TABLE:
            table.indptr = take(f"indptr.{index}", (rows + 1,), torch.int32)
            table.indices = take(f"indices.{index}", (extent.entries + form.index_slack,), form.index_dtype)
            table.last_page_len = take(f"last_page_len.{index}", (rows,), torch.int32)
        return table


def _width(pages: int, form: TableForm) -> int:
    """Columns of a block table whose longest row has so many pages."""
    return max(1, -(-pages // form.width_multiple)) * form.width_multiple


_WRITES = ((Space.FULL, "out_cache_loc"), (Space.ENCODER, "encoder_out_cache_loc"))
