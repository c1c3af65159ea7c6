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
from anyattn.core.metadata.buffers import StepBuffers, Take
from anyattn.core.metadata.checks import check_host, check_values
from anyattn.core.metadata.extent import max_kv_len, max_q_len, table_extent
from anyattn.core.metadata.masks import fill_mask, prepare_mask
from anyattn.core.metadata.upload import Uploader
from anyattn.core.metadata.windows import check_ids, check_windows, fill_windows, prepare_windows
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
        self._uploader = Uploader(self.device)
        self._groups = tuple(g for g in groups.table_groups if g.kind is not AttentionKind.ENCODER_ONLY)

    def prepare(
        self,
        batch: ForwardBatch,
        buffers: StepBuffers | None = None,
        *,
        tree_mask: TreeMaskMode = TreeMaskMode.FULL_MASK,
        strategies: Sequence[Strategy] = (Strategy.PAGED,),
    ) -> Plan:
        """Host half: checks, bounds, upload and storage. With `buffers`, every tensor lives in them.

        `tree_mask`: the form that the backend reads (`Traits.tree_mask`). `strategies`: those it offers.

        Raises:
            BatchError: whatever `checks.check_host` finds, or a batch that doesn't fit the buffers.
        """
        check_ids(batch, self.pool)
        if self.checks != "off":
            check_host(batch, self.table, self.pool.page_size, self.pool.listed_slots)
            self._check_writable(batch)
        take: Take = self._allocate if buffers is None else buffers.take
        given = self._upload(batch)
        num_requests, num_tokens = batch.batch_size, batch.num_tokens
        plan = Plan(
            key=PlanKey(batch.serial, self.owner, batch.forward_mode, num_requests, num_tokens),
            batch=batch,
            req_pool_indices=_placed(take, "req_pool_indices", given["req"], torch.int64),
            seq_lens=_placed(take, "seq_lens", given["seq"], torch.int32),
            extend_lens=_placed(take, "extend_lens", given["ext"], torch.int32),
            prefix_lens=take("prefix_lens", (num_requests,), torch.int32),
            query_offsets=take("query_offsets", (num_requests + 1,), torch.int32),
            positions=take("positions", (num_tokens,), torch.int64),
            write_locs=_write_locs(take, given),
            max_q_len=max_q_len(batch),
            max_kv_len=max_kv_len(batch, self.table.max_context),
            strategy=choose_strategy(batch, strategies),
        )
        if "positions" in given:
            plan.positions.copy_(given["positions"])
        if "encoder_lens" in given:
            plan.encoder_lens = _placed(take, "encoder_lens", given["encoder_lens"], torch.int32)
        if batch.exact is not None:
            plan.host_seq_lens = batch.exact.seq_lens.tolist()
            plan.host_extend_lens = batch.exact.extend_lens.tolist()
        prepare_mask(plan, tree_mask, take, self.device)
        prepare_windows(plan, self.pool, take)
        for index, group in enumerate(self._groups):
            if plan.strategy is not Strategy.RAGGED or group.space is Space.ENCODER:
                plan.tables[group] = self._new_table(index, group, plan, take)
        return plan

    def fill(self, plan: Plan) -> None:  # anyattn: in-graph
        """Device half: static shapes, no host sync; may be recorded in a graph."""
        if self.filler is None or plan.strategy is Strategy.RAGGED_MERGE:
            self._fill_tables(plan)
        else:
            self.filler(plan)
        fill_mask(plan)
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

    def _check_writable(self, batch: ForwardBatch) -> None:
        loc = batch.out_cache_loc
        if loc is not None and loc.device.type == "cpu":
            self.pool.check_writable(loc[: batch.num_tokens - batch.num_padding_tokens])

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _upload(self, batch: ForwardBatch) -> dict[str, torch.Tensor]:
        fields = {
            "req": batch.req_pool_indices,
            "seq": batch.seq_lens,
            "ext": batch.extend_seq_lens,
            "loc": batch.out_cache_loc,
            "positions": batch.positions,
            "encoder_lens": batch.encoder_lens,
            "encoder_loc": batch.encoder_out_cache_loc,
        }
        present = {name: value for name, value in fields.items() if value is not None}
        return dict(zip(present, self._uploader.upload(list(present.values())), strict=True))

    def _new_table(self, index: int, group: TableGroup, plan: Plan, take: Take) -> Table:
        form, rows = self.form, plan.key.num_requests
        prefix_only = plan.strategy is Strategy.RAGGED_MERGE
        extent = table_extent(plan.batch, group, form, self.table, prefix_only=prefix_only)
        table = Table(
            form,
            kv_start=take(f"kv_start.{index}", (rows,), torch.int32),
            kv_lens=take(f"kv_lens.{index}", (rows,), torch.int32),
            host=extent.host,
        )
        if form.kind is TableKind.BLOCK_TABLE:
            width = max(1, -(-extent.widest // form.width_multiple)) * form.width_multiple
            table.block_table = take(f"block_table.{index}", (rows, width), form.index_dtype)
        elif form.kind is not TableKind.REQUEST_TABLE:
            table.indptr = take(f"indptr.{index}", (rows + 1,), torch.int32)
            table.indices = take(f"indices.{index}", (extent.entries + form.index_slack,), form.index_dtype)
            table.last_page_len = take(f"last_page_len.{index}", (rows,), torch.int32)
        return table


def _placed(take: Take, name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`value` copied (and cast) into the storage of `name`: a plan never aliases the caller's tensors."""
    out = take(name, tuple(value.shape), dtype)
    out.copy_(value)
    return out


def _write_locs(take: Take, given: dict[str, torch.Tensor]) -> dict[Space, torch.Tensor]:
    names = {Space.FULL: ("loc", "out_cache_loc"), Space.ENCODER: ("encoder_loc", "encoder_out_cache_loc")}
    return {
        space: _placed(take, name, given[key], torch.int64)
        for space, (key, name) in names.items()
        if key in given
    }
