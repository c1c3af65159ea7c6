"""One latent step against the definition in float64.

The definition (arXiv 2405.04434): expand what *should* stand in every slot to keys and values of each head,
then plain attention. An absorbed step is judged by it too, its output projected in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import anyattn
from anyattn.core.mla import MLAMethod
from anyattn.core.plan import Plan
from anyattn.core.traits import KVRead
from anyattn.testing import oracle
from anyattn.testing.mla_cases import MLACase
from anyattn.testing.mla_world import MLAWorld, mla_batch, mla_facts
from anyattn.testing.oracle import OracleRequest

__all__ = ["MLAReport", "check_mla_case"]

_E4M3 = 2.0**-4
"""Relative step of e4m3 (3 bits of mantissa), to which kernels that take fp8 operands round the weights."""


@dataclass(frozen=True)
class MLAReport:
    """Errors per request (max |d| / max |ref|; the LSE's against max(1, |ref|)), and broken promises."""

    case: MLACase
    method: MLAMethod
    errors: tuple[float, ...]
    faults: tuple[str, ...]
    rounded: bool = False

    @property
    def allowed(self) -> float:
        """The case's tolerance; e4m3's for a kernel that rounds queries, since it rounds weights as well."""
        return max(self.case.tolerance(), _E4M3) if self.rounded else self.case.tolerance()

    @property
    def error(self) -> float:
        """The largest of all."""
        return max(self.errors, default=0.0)

    @property
    def passed(self) -> bool:
        """Within the case's tolerance, without a fault."""
        return not self.faults and self.error <= self.allowed

    def __str__(self) -> str:
        text = f"{self.method.value}: error {self.error:.3g} (allowed {self.allowed:.0e})"
        return "\n".join([f"{text} in {self.case!r}", *self.faults])


def check_mla_case(
    case: MLACase, *, backend: str | None = "torch_native", device: str = "cpu", host: str | None = None
) -> MLAReport:
    """Build, run and judge one case; `host`: decided for this emulated host, whose stand-ins are in place."""
    world = MLAWorld(case, backend=backend, device=device, host=host)
    for slots, prefix in zip(world.slots, case.prefix_lens, strict=True):
        world.fill(slots[:prefix])
    new = torch.cat([s[p:] for s, p in zip(world.slots, case.prefix_lens, strict=True)])
    if case.kv == "cached":
        world.fill(new)
    requests, mask, positions = mla_facts(world)
    batch = mla_batch(world, new, mask, positions)
    plan = world.backend.init_forward_metadata(batch)
    assert plan.mla_method is not None
    tokens = sum(case.extend_lens) + case.padding
    q_nope = world.random(tokens, case.num_q_heads, case.nope)
    q_rope = world.random(tokens, case.num_q_heads, case.rope)
    rows = None if case.kv == "cached" else world.random(tokens, case.rank + case.rope)
    q = q_nope if plan.mla_method.expands else _absorbed(q_nope, world.w_k)
    before = _storage(world)
    out, lse, faults = _call(world, batch, plan, q, q_rope, rows)
    given = new if case.kv == "write" else new[:0]
    if rows is not None and case.kv == "write":
        world.expect(new, rows[: new.shape[0]])
    faults += _storage_faults(world, before, given)
    traits = world.backend.traits(batch.forward_mode)
    direct = traits.kv_read is KVRead.DIRECT or case.kv == "arguments"
    if rows is not None and direct:
        world.latents[new] = rows[: new.shape[0]].double()
    rounded = traits.rounds_queries and not plan.mla_method.expands
    if rounded:
        q, q_rope = (oracle.stored_values(x, world.kv_dtype, 1.0).to(x.dtype) for x in (q, q_rope))
    want_out, want_lse = _expected(world, requests, q_nope, q, q_rope, plan.mla_method)
    size = case.v_dim if plan.mla_method.expands else case.rank
    got = out.cpu().double().view(tokens, case.num_q_heads, size)
    if not plan.mla_method.expands:
        got = torch.einsum("thr,hvr->thv", got, world.w_v.double())
    errors, row = [], 0
    for count in (*case.extend_lens, case.padding):
        span = slice(row, row + count)
        errors.append(oracle.relative_error(got[span], want_out[span]))
        if lse is not None:
            errors.append(oracle.relative_error(lse[span], want_lse[span], floor=1.0))
        row += count
    return MLAReport(case, plan.mla_method, tuple(errors), tuple(faults), rounded)


def _absorbed(q_nope: torch.Tensor, w_k: torch.Tensor) -> torch.Tensor:
    return torch.einsum("thn,hnr->thr", q_nope.double(), w_k.double()).to(q_nope.dtype)


def _expected(
    world: MLAWorld,
    requests: Sequence[OracleRequest],
    q_nope: torch.Tensor,
    q: torch.Tensor,
    q_rope: torch.Tensor,
    method: MLAMethod,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out [T, Hq, v], lse [T, Hq])` by definition; rounded absorbed queries as they were given."""
    case, spec = world.case, world.case.spec()
    latent, rope = world.latents[:, None, : case.rank], world.latents[:, None, case.rank :]
    keys = torch.cat(
        (
            torch.einsum("sxr,hnr->shn", latent, world.w_k.double()),
            rope.expand(-1, case.num_q_heads, -1),
        ),
        dim=2,
    )
    values = torch.einsum("sxr,hvr->shv", latent, world.w_v.double())
    query = torch.cat((q_nope.double(), q_rope.double()), dim=2)
    rounded = not method.expands and case.dtype != "float32"
    if rounded:
        query, keys = torch.cat((q.double(), q_rope.double()), dim=2), world.latents[:, None]
        values = latent
    out, lse = oracle.attend(
        query, keys, values, requests,
        scale=spec.scale, window=case.window, logit_cap=case.logit_cap, sinks=world.sinks,
    )  # fmt: skip
    return (torch.einsum("thr,hvr->thv", out, world.w_v.double()) if rounded else out), lse


def _call(
    world: MLAWorld,
    batch: anyattn.ForwardBatch,
    plan: Plan,
    q: torch.Tensor,
    q_rope: torch.Tensor,
    rows: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, list[str]]:
    """Run the layer; faults are inputs that changed."""
    case, device = world.case, world.device
    extra: dict[str, torch.Tensor] = {}
    k = None if rows is None else rows[:, None].to(device)
    q = q.to(device)
    if case.apart:
        extra["q_rope"] = q_rope.to(device)
        if k is not None:
            extra["k_rope"], k = k[..., case.rank :], k[..., : case.rank]
    else:
        q = torch.cat((q, q_rope.to(device)), dim=2)
    if case.strided:
        q = torch.cat((q, q[..., :3]), dim=2)[..., :-3]
    if case.flat:
        q = q.reshape(q.shape[0], q.shape[1] * q.shape[2])
        k = None if k is None else k.reshape(k.shape[0], k.shape[2])
    size = case.v_dim if plan.mla_method is not None and plan.mla_method.expands else case.rank
    outs: dict[str, torch.Tensor] = {}
    if case.give_out:
        shape = (q.shape[0], case.num_q_heads, size)
        out = torch.full(shape, torch.nan, dtype=world.dtype, device=device)
        outs["out"] = out.view(q.shape[0], case.num_q_heads * size) if case.flat else out
        if case.return_lse:
            outs["lse_out"] = torch.full(shape[:2], torch.nan, device=device)
    tensors = [x for x in (q, k, *extra.values()) if x is not None]
    before = [x.clone() for x in tensors]
    inputs = anyattn.LayerInputs(**extra) if extra else None
    with anyattn.forward_context(world.backend, plan):
        result = world.layer(
            q, k, None, batch,
            save_kv_cache=case.kv == "write", return_lse=case.return_lse, inputs=inputs, **outs,
        )  # fmt: skip
    out, lse = result if case.return_lse else (result, None)
    pairs = enumerate(zip(tensors, before, strict=True))
    faults = [f"input {i} was modified" for i, (x, was) in pairs if not torch.equal(x, was)]
    flat = (q.shape[0], case.num_q_heads * size)
    if out.shape != (flat if case.flat else (q.shape[0], case.num_q_heads, size)):
        faults.append(f"out is {tuple(out.shape)}")
    if out.dtype != world.dtype or (case.give_out and out is not outs["out"]):
        faults.append("out has another dtype, or isn't out=")
    return out, lse, faults


def _storage(world: MLAWorld) -> torch.Tensor:
    parts = [cache.flatten(2).contiguous().view(torch.uint8) for cache in world.pool.caches(0)]
    return torch.cat(parts, dim=2)


def _storage_faults(world: MLAWorld, before: torch.Tensor, written: torch.Tensor) -> list[str]:
    """Slots of the step hold what they should, all others (page 0 apart) are as they were, bit for bit."""
    faults = []
    if written.numel() and not torch.equal(world.stored(written), world.latents[written]):
        faults.append("latents were not stored as given")
    untouched = torch.ones(world.pool.total_slots, dtype=torch.bool)
    untouched[written] = False
    untouched[: world.pool.page_size] = False
    at = untouched.view(-1, world.pool.page_size).to(before.device)
    if not torch.equal(before[at], _storage(world)[at]):
        faults.append("storage changed at slots that the step doesn't own")
    return faults
