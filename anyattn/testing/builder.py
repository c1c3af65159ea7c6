"""From a `Case` to a step: the batch, its inputs and the facts for the oracle, through the public API.

`judge` runs the step and gives the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import anyattn
from anyattn.core.traits import KVRead
from anyattn.testing import oracle
from anyattn.testing.oracle import OracleRequest
from anyattn.testing.world import World

__all__ = ["Step", "build_step"]


@dataclass(eq=False)
class Step:
    """One step of a world: the batch, its inputs, where its KV goes, and the facts for the oracle.

    `keys`, `values` are what the step should attend to, by slot, at the time of the step; `written` the
    slots that it stores to. `out`, `lse` and `faults` are set when it runs.
    """

    world: World
    batch: anyattn.ForwardBatch
    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    kv: str
    requests: list[OracleRequest]
    keys: torch.Tensor
    values: torch.Tensor
    written: torch.Tensor
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    faults: tuple[str, ...] = ()


def build_step(
    world: World,
    members: Sequence[int] | None = None,
    prefix_lens: Sequence[int] | None = None,
    extend_lens: Sequence[int] | None = None,
    *,
    mode: str | None = None,
    kv: str | None = None,
    fill_prefix: bool = True,
    inputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] | None = None,
) -> Step:
    """A step of `members` (indices into the case's requests) with these lengths; default: the case's own.

    `kv` as in the case. `fill_prefix` puts random KV where the step expects it already (prefix, encoder);
    False where earlier steps stored it. `inputs` are (q, k, v) where they aren't to be random.
    """
    case = world.case
    kv = kv or case.kv
    members = range(case.batch_size) if members is None else members
    prefix = [case.prefix_lens[m] for m in members] if prefix_lens is None else list(prefix_lens)
    extend = [case.extend_lens[m] for m in members] if extend_lens is None else list(extend_lens)
    if fill_prefix and case.kind in ("causal", "bidirectional"):
        for member, length in zip(members, prefix, strict=True):
            world.fill(world.slots[member][:length])
    tokens = sum(extend) + case.padding
    q, k, v = _inputs(world, members, tokens) if inputs is None else inputs
    new = [world.slots[m][p : p + e] for m, p, e in zip(members, prefix, extend, strict=True)]
    requests, mask, positions = _facts(world, members, prefix, extend)
    batch = _batch(world, members, prefix, extend, new, mode or case.mode, kv, mask, positions)
    if kv == "cached":
        batch = batch.view(kv_stored=True)
    step = Step(world, batch, q, k, v, kv, requests, world.keys, world.values, torch.empty(0).long())
    _settle_kv(step, members, new, fill_prefix)
    return step


def _inputs(
    world: World, members: Sequence[int], tokens: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    case = world.case
    q_size, k_size, v_size = (
        (case.num_q_heads, case.head_dim),
        (case.num_kv_heads, case.head_dim),
        (case.num_kv_heads, case.v_head_dim),
    )
    k: torch.Tensor | None
    v: torch.Tensor | None
    if case.kind == "cross":
        (q,) = world.fused(tokens, q_size, strided=case.strided)
        k, v = world.fused(
            sum(world.encoder_slots[m].shape[0] for m in members), k_size, v_size, strided=case.strided
        )
    else:
        q, k, v = world.fused(tokens, q_size, k_size, v_size, strided=case.strided)
    return q, k, v


def _facts(
    world: World, members: Sequence[int], prefix: Sequence[int], extend: Sequence[int]
) -> tuple[list[OracleRequest], anyattn.ExplicitMask | None, list[int] | None]:
    """Requests as the oracle sees them (slots read from the raw tables), the mask and the positions."""
    case, table, requests = world.case, world.table, []
    for member, cached, new in zip(members, prefix, extend, strict=True):
        row = world.rows[member]
        if case.kind == "cross":
            assert table.encoder_to_token is not None
            length = world.encoder_slots[member].shape[0]
            slots = oracle.read_slots(table.encoder_to_token.cpu(), row, length)
        elif case.kind == "encoder_only":
            slots = world.slots[member][:new].tolist()
        else:
            slots = oracle.read_slots(table.req_to_token.cpu(), row, cached + new)
        mask, positions = _mask(world, cached, new)
        requests.append(OracleRequest(slots=slots, num_queries=new, positions=positions, mask=mask))
    masks = [r.mask for r in requests if r.mask is not None]
    if not masks:
        return requests, None, None
    if case.padding and case.mode == "extend":
        masks.append(torch.empty(0, 0))
    positions = [int(p) for r in requests for p in r.positions or range(r.prefix, r.prefix + r.num_queries)]
    given = positions if case.mode == "verify" else None
    return requests, anyattn.ExplicitMask.from_matrices(masks), given


def _mask(world: World, cached: int, new: int) -> tuple[torch.Tensor | None, list[int] | None]:
    if world.case.mask == "tree":
        return _tree(world, cached, new)
    if world.case.mask is None:
        return None, None
    cells = torch.rand(new, cached + new, generator=world.generator) < 0.6
    empty = torch.rand(new, 1, generator=world.generator) < 0.15
    return cells & ~empty, None


def _tree(world: World, cached: int, new: int) -> tuple[torch.Tensor, list[int]]:
    """A random tree of `new` draft tokens: each sees the prefix, its ancestors and itself."""
    mask = torch.zeros(new, cached + new, dtype=torch.bool)
    mask[:, :cached] = True
    positions: list[int] = []
    for token in range(new):
        parent = world.rng.randrange(-1, token)
        if parent >= 0:
            mask[token] = mask[parent]
        mask[token, cached + token] = True
        positions.append(cached if parent < 0 else positions[parent] + 1)
    return mask, positions


def _batch(
    world: World,
    members: Sequence[int],
    prefix: Sequence[int],
    extend: Sequence[int],
    new: Sequence[torch.Tensor],
    mode: str,
    kv: str,
    mask: anyattn.ExplicitMask | None,
    positions: list[int] | None,
) -> anyattn.ForwardBatch:
    case, padding = world.case, world.case.padding
    rows = [world.rows[m] for m in members]
    loc = [int(s) for slots in new for s in slots] + [0] * padding
    seq = [p + e for p, e in zip(prefix, extend, strict=True)]

    def ints(values: Sequence[int]) -> list[int] | torch.Tensor:
        exact = list(values)
        return torch.tensor(exact, dtype=torch.int64, device=world.device) if case.device_ints else exact

    host: dict[str, Any] = {"host_lens": "copy"} if case.device_ints else {}
    if case.kind == "cross":
        host["encoder_lens"] = [world.encoder_slots[m].shape[0] for m in members]
        if kv == "write":
            host["encoder_out_cache_loc"] = torch.cat([world.encoder_slots[m] for m in members]).tolist()
    if mode == "decode":
        fill = world.backend.get_cuda_graph_seq_len_fill_value(anyattn.ForwardMode.DECODE, 1)
        rows += [world.table.padding_row] * padding
        lens = [*seq, *[fill] * padding]
        return anyattn.ForwardBatch.decode(
            ints(rows), ints(lens), ints(loc), num_padding_requests=padding, **host
        )
    common = (ints(rows), ints(prefix), ints(extend), ints(loc))
    if mode == "mixed":
        return anyattn.ForwardBatch.mixed(*common, num_decode=case.num_decode, **host)
    if mode == "verify":
        return anyattn.ForwardBatch.verify(*common, mask=mask, positions=positions, **host)
    if padding:
        rows, prefix, extend = [*rows, world.table.padding_row], [*prefix, 0], [*extend, 0]
        common = (ints(rows), ints(prefix), ints(extend), ints(loc))
        host |= {"num_padding_requests": 1, "num_padding_tokens": padding}
    if case.kind == "encoder_only" and case.seed % 3:
        return anyattn.ForwardBatch.extend(rows, prefix, extend, None, mask=mask)
    return anyattn.ForwardBatch.extend(*common, mode=anyattn.ForwardMode(mode), mask=mask, **host)


def _settle_kv(step: Step, members: Sequence[int], new: Sequence[torch.Tensor], fill: bool) -> None:
    """What the step stores, and what it should attend to."""
    world, case = step.world, step.world.case
    slots = torch.cat([world.encoder_slots[m] for m in members] if case.kind == "cross" else list(new))
    if step.kv == "cached":
        step.k = step.v = None
        if fill:
            world.fill(slots)
    count = slots.shape[0]
    if step.kv == "write" and step.k is not None and step.v is not None:
        world.expect(slots, step.k[:count], step.v[:count])
        step.written = slots
    step.keys, step.values = world.keys.clone(), world.values.clone()
    mode = step.batch.forward_mode
    direct = step.kv == "arguments" or world.backend.traits(mode).kv_read is KVRead.DIRECT
    if direct and step.k is not None and step.v is not None:
        step.keys[slots] = step.k[:count].cpu().double()
        step.values[slots] = step.v[:count].cpu().double()
