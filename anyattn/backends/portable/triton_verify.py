"""Steps of a few query tokens a request in the Triton backend: which have their keys cut, and their plans."""

from __future__ import annotations

import torch

from anyattn.core.batch import ForwardMode
from anyattn.core.groups import PlanGroup, Space
from anyattn.core.masks import TreeMaskMode, VerifyMask
from anyattn.core.plan import Plan, Table
from anyattn.core.spec import AttentionKind
from anyattn.kernels.triton.attention import Heads
from anyattn.kernels.triton.configs.choose import power_of_two
from anyattn.kernels.triton.configs.choose_verify import FEW_ROWS, choose_few, choose_verify, verify_row
from anyattn.kernels.triton.verify_launch import ALL_COLUMNS, DRAFTS, NO_MASK, VerifyMasks, VerifyStep

__all__ = ["few_step", "verify_step"]

READ = 1.1
"""Time of a tile that is read alone, over that of one which is multiplied beside others. On an H200, 63 x (4k
+ 1) beside a chunk took 537 us in one launch, 278 for the chunk and 259 for the rest, which is the rate of
memory: what can be gained is what the dealing of row blocks leaves idle.
"""
LAUNCHES = 8
"""Tiles that take the time of the launches that come on top."""
FEW_SHARE = 0.3
"""Of row blocks, those with few rows, from which on a captured graph, which serves any lengths, is split."""
FEW_KEYS = 0.5
"""Keys of such requests, times KV heads, a SM or CU, of those that a request must have to be cut at all:
fewer aren't worth launches of their own. Estimated.
"""
_ROWS, _TILE, _BETWEEN = 128, 128, 2  # of a row block; tiles that one takes the time of between others


def verify_step(
    plan: Plan, group: PlanGroup, heads: Heads, source: torch.Tensor, run: int, *,
    itemsize: int, kv_itemsize: int, arch: str, units: int, even: bool,
) -> VerifyStep | None:  # fmt: skip
    """With storage of its own; None where the extend kernels are the faster ones.

    Args:
        source: request table. run: consecutive slots of a table entry. even: see `choose_verify`; the others
            as there. Everything else follows from the plan's shapes and bounds.
    """
    table = _table(plan, group)
    if table is None:
        return None
    masks = _masks(plan)
    tiles = choose_verify(
        max(1, plan.key.num_requests), heads.num_kv, heads.group, max(1, plan.max_q_len),
        _longest(plan, group, run), max(heads.dim, heads.v_dim), itemsize, arch, units,
        even=even, masked=masks.kind == ALL_COLUMNS, kv_itemsize=kv_itemsize, run=run,
    )  # fmt: skip
    if tiles is None:
        return None
    return VerifyStep.of(
        source, plan.req_pool_indices, table.kv_start, table.kv_lens, plan.query_offsets, plan.prefix_lens,
        run, heads, tiles, masks,
    )  # fmt: skip


def few_step(
    plan: Plan, group: PlanGroup, heads: Heads, source: torch.Tensor, run: int, *,
    itemsize: int, kv_itemsize: int, arch: str, units: int,
) -> VerifyStep | None:  # fmt: skip
    """That of the requests with few query rows, where others have many and are extended; None where all are.

    Which request is whose, both kernels see from the lengths on the device. Arguments: `verify_step`.
    """
    table, modes = _table(plan, group), (ForwardMode.MIXED, ForwardMode.EXTEND)
    if table is None or plan.mask_cells is not None or plan.key.mode not in modes:
        return None
    tiles = choose_few(
        max(1, plan.key.num_requests), heads.num_kv, heads.group, power_of_two(_longest(plan, group, run)),
        max(heads.dim, heads.v_dim), itemsize, arch, units, kv_itemsize=kv_itemsize,
    )  # fmt: skip
    row = verify_row(arch, max(heads.dim, heads.v_dim), itemsize, FEW_ROWS)
    least = FEW_KEYS * units * row.min_keys
    if tiles is None or not _worthwhile(plan, group, heads, tiles.max_new, units, least, row.few_gain):
        return None
    return VerifyStep.of(
        source, plan.req_pool_indices, table.kv_start, table.kv_lens, plan.query_offsets, plan.prefix_lens,
        run, heads, tiles, _masks(plan), among=True,
    )  # fmt: skip


def _worthwhile(
    plan: Plan, group: PlanGroup, heads: Heads, max_new: int, units: int, least: float, gain: float
) -> bool:
    """Two launches take less time than the row blocks of all requests in one."""
    exact, window = plan.batch.exact, group.table.window
    if plan.max_q_len <= max_new:
        return False
    if exact is None:  # a captured graph: contexts of either kind may have any length
        few, others = plan.batch.num_decode, plan.key.num_tokens - plan.batch.num_decode
        blocks = -(-others * heads.group // _ROWS)
        return few * heads.num_kv >= units and few >= FEW_SHARE * (few + blocks)
    new, keys = exact.extend_lens, exact.seq_lens
    few_rows = new <= max_new
    if not bool(few_rows.any()):
        return False
    read = keys[few_rows] if window is None else keys[few_rows].clamp(max=window)
    total = int(read.sum()) * heads.num_kv
    if total < least:
        return False
    many = ~few_rows
    apart = _busiest(new[many], keys[many], window, heads, units)
    split = apart + READ * total / _TILE / units + LAUNCHES
    return _busiest(new, keys, window, heads, units) > gain * split


def _busiest(new: torch.Tensor, keys: torch.Tensor, window: int | None, heads: Heads, units: int) -> int:
    """Tiles of the program with most of them, as `extend_hopper_kernel` deals row blocks out; elsewhere
    blocks begin as others end, and this is an estimate.
    """
    tokens = _ROWS // heads.group
    counts = (new + (tokens - 1)) // tokens
    request = torch.repeat_interleave(counts)
    block = torch.arange(request.shape[0], device="cpu") - (counts.cumsum(0) - counts)[request]
    behind = (new[request] - (block + 1) * tokens).clamp(min=0)
    seen = keys[request] - behind
    if window is not None:
        seen = seen.clamp(max=window + tokens)
    tiles = ((seen + (_TILE - 1)) // _TILE + _BETWEEN).flip(0).repeat_interleave(heads.num_kv)
    rounds = torch.nn.functional.pad(tiles, (0, -tiles.shape[0] % units)).view(-1, units)
    load = rounds[::2].sum(0) + rounds[1::2].sum(0).flip(0)  # to and fro
    return int(load.max())


def _table(plan: Plan, group: PlanGroup) -> Table | None:
    """The table of a group whose keys may be cut."""
    space, kind = group.table.space, group.table.kind
    if space is Space.ENCODER or kind is AttentionKind.ENCODER_ONLY:
        return None
    return plan.tables.get(group.table)


def _longest(plan: Plan, group: PlanGroup, run: int) -> int:
    """Bound of the keys that a table lists of a request."""
    window = group.table.window
    if window is None:
        return plan.max_kv_len
    return min(plan.max_kv_len, window + plan.max_q_len + run)  # a trimmed table begins at a page


def _masks(plan: Plan) -> VerifyMasks:
    """A mask of the drafts among themselves shows what is older, spelled out as it may be."""
    mask, kind = plan.batch.mask, NO_MASK
    if plan.mask_cells is not None:
        drafts = isinstance(mask, VerifyMask) and mask.mode is TreeMaskMode.QLEN_ONLY
        kind = DRAFTS if drafts else ALL_COLUMNS
    positions = None if plan.batch.positions is None else plan.positions
    return VerifyMasks(kind, plan.mask_cells, plan.mask_indptr, positions)
