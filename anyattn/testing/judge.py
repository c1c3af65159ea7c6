"""From a step to a verdict: run it, ask the oracle, compare; and look for what else it touched."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import anyattn
from anyattn.core.batch import ForwardBatch
from anyattn.core.plan import Plan
from anyattn.core.step_backend import StepBackend
from anyattn.testing import oracle
from anyattn.testing.builder import Step, build_step
from anyattn.testing.cases import Case
from anyattn.testing.emulators import emulating
from anyattn.testing.raw_caches import addressed
from anyattn.testing.world import World

__all__ = ["Report", "check_case", "expected", "judge", "planned_in_buffers", "run_step"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as an element: NaN equals itself in them."""

_EIGHT_BITS = 6e-2
"""Kernels that take queries in 8 bits round the weights of values so too: 3 bits behind the leading one."""


@dataclass(frozen=True)
class Report:
    """Errors per request (max |d| / max |ref|; the LSE's against max(1, |ref|)), and broken promises.

    `tolerance` is the case's own unless given.
    """

    case: Case
    out_errors: tuple[float, ...]
    lse_errors: tuple[float, ...]
    faults: tuple[str, ...]
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if not self.tolerance:
            object.__setattr__(self, "tolerance", self.case.tolerance())

    @property
    def error(self) -> float:
        """The largest of all."""
        return max((*self.out_errors, *self.lse_errors), default=0.0)

    @property
    def passed(self) -> bool:
        """Within the case's tolerance, without a fault."""
        return not self.faults and self.error <= self.tolerance

    def __str__(self) -> str:
        text = f"error {self.error:.3g} (allowed {self.tolerance:.0e}) in {self.case!r}"
        return "\n".join([text, *self.faults])


def check_case(
    case: Case, *, backend: str | None = "torch_native", device: str = "cpu", host: str | None = None,
    emulated: bool = False,
) -> Report:  # fmt: skip
    """Build, run and judge one case.

    Args:
        host: decided for this emulated host, whose stand-ins are in place.
        emulated: put the stand-ins of the backend's emulator in place for this case.
    """
    if emulated:
        assert backend is not None
        with emulating(backend, host) as emulator:
            return check_case(case, backend=backend, host=host or emulator.host)
    world = World(case, backend=backend, device=device, raw_prefix=case.seed % 2 == 1, host=host)
    step = build_step(world)
    run_step(step)
    return judge(step)


def planned_in_buffers(backend: StepBackend, batch: ForwardBatch) -> Plan:
    """Prepared as before a capture: in the buffers that a graph reads, where the backend has them."""
    plan = backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata_in_graph(plan)
    return plan


def run_step(step: Step, plan: Plan | None = None) -> Step:
    """Plan (unless given) and run; `step.out`, `step.lse` and `step.faults` (changed inputs) are set."""
    world, case = step.world, step.world.case
    q, k, v = (_flat(x) if case.flat else x for x in (step.q, step.k, step.v))
    assert q is not None
    before = [None if x is None else x.clone() for x in (q, k, v)]
    table, storage = world.table.req_to_token.clone(), _storage(world)
    out, lse_out = _outputs(step) if case.give_out else (None, None)
    plan = world.backend.init_forward_metadata(step.batch) if plan is None else plan
    with anyattn.forward_context(world.backend, plan):
        result = world.layer(
            q, k, v, step.batch,
            save_kv_cache=step.kv == "write", return_lse=case.return_lse, out=out, lse_out=lse_out,
        )  # fmt: skip
    step.out, step.lse = result if case.return_lse else (result, None)
    faults = [
        f"{name} was modified"
        for name, x, was in zip(("q", "k", "v"), (q, k, v), before, strict=True)
        if x is not None and was is not None and not torch.equal(_bits(x), _bits(was))
    ]
    if not torch.equal(world.table.req_to_token, table):
        faults.append("req_to_token was modified")
    if out is not None and (step.out is not out or step.lse is not lse_out):
        faults.append("out= or lse_out= was not returned")
    step.faults = (*faults, *_storage_faults(step, storage))
    return step


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)  # NaN may stand in inputs, and isn't equal to itself


def _flat(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.view(x.shape[0], x.shape[1] * x.shape[2])


def _outputs(step: Step) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`out=` (a slice of something wider where the case is strided) and `lse_out=`, full of NaN."""
    case, tokens = step.world.case, step.batch.num_tokens
    width = case.num_q_heads * case.v_head_dim
    wide = step.q.new_full((tokens, width + (4 if case.strided else 0)), torch.nan)[:, :width]
    out = wide if case.flat else wide.view(tokens, case.num_q_heads, case.v_head_dim)
    lse = torch.full((tokens, case.num_q_heads), torch.nan, device=step.q.device) if case.return_lse else None
    return out, lse


def _storage(world: World) -> list[torch.Tensor]:
    caches = world.pool.key_cache(world.layer_id), world.pool.value_cache(world.layer_id)
    return [c.view(_BITS[c.dtype.itemsize]).clone() for c in caches]


def _storage_faults(step: Step, before: list[torch.Tensor]) -> list[str]:
    """Slots of the step hold what they should, all others (page 0 apart) are as they were, bit for bit."""
    world = step.world
    faults = []
    if step.written.numel():
        for name, got, copy in zip("kv", world.stored(step.written), (world.keys, world.values), strict=True):
            if not torch.equal(got, copy[step.written]):
                faults.append(f"{name} was not stored as given")
    page = world.pool.page_size
    own = torch.cat([torch.arange(page), step.written.cpu()])
    for name, was, now in zip("KV", before, _storage(world), strict=True):
        untouched = torch.ones(was.shape, dtype=torch.bool)
        rows = addressed(untouched, world.pool, world.layer_id, values=name == "V")
        rows[own // page, own % page] = torch.zeros((), dtype=torch.bool)
        if not torch.equal(was[untouched.to(was.device)], now[untouched.to(was.device)]):
            faults.append(f"{name} storage changed at slots that the step doesn't own")
    return faults


def expected(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle's `(out [T, Hq, Dv], lse [T, Hq])`, float64; padding is zero and -inf."""
    spec, queries = step.world.case.spec(), step.q.detach().cpu()
    if _rounds_queries(step):
        queries = oracle.stored_values(queries, step.world.kv_dtype)
    return oracle.attend(
        queries,
        step.keys,
        step.values,
        step.requests,
        scale=spec.scale,
        kind=spec.kind.value,
        window=spec.sliding_window,
        logit_cap=spec.logit_cap,
        sinks=step.world.sinks,
    )


def _rounds_queries(step: Step) -> bool:
    return step.world.backend.traits(step.batch.forward_mode).rounds_queries


def judge(step: Step) -> Report:
    """Compare a step that was run with the oracle, request by request, padding last."""
    case = step.world.case
    want_out, want_lse = expected(step)
    assert step.out is not None
    shape = tuple(step.out.shape)
    wanted = (step.q.shape[0], case.num_q_heads * case.v_head_dim) if case.flat else tuple(want_out.shape)
    faults = [*step.faults]
    if shape != wanted or step.out.dtype != step.world.dtype:
        faults.append(f"out is {shape} {step.out.dtype}, not {wanted} {step.world.dtype}")
        return Report(case, (), (), tuple(faults))
    got = step.out.reshape(want_out.shape)
    out_errors, lse_errors, row = [], [], 0
    for count in (*(r.num_queries for r in step.requests), case.padding):
        rows = slice(row, row + count)
        out_errors.append(oracle.relative_error(got[rows], want_out[rows]))
        if step.lse is not None:
            lse_errors.append(oracle.relative_error(step.lse[rows], want_lse[rows], floor=1.0))
        row += count
    tolerance = max(_EIGHT_BITS, case.tolerance()) if _rounds_queries(step) else case.tolerance()
    return Report(case, tuple(out_errors), tuple(lse_errors), tuple(faults), tolerance)
