"""From a decision to a backend: load the winners' classes, build them on one pool, wrap them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from anyattn.core.arguments import check_instance
from anyattn.core.capabilities import CapabilityRow, FormSpec, Phase
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.dtypes import torch_dtype
from anyattn.core.groups import GroupSet
from anyattn.core.kv.pools.base import KVPool
from anyattn.core.kv.request_table import RequestTable
from anyattn.core.kv.translate import bind_and_verify_backends
from anyattn.core.measure.bucket import Role
from anyattn.core.mla import MLAPolicy
from anyattn.core.plan import TableForm, TableKind
from anyattn.core.registry import load_target
from anyattn.core.select.libraries import serving_provider
from anyattn.core.select.pages import TOKEN_MAJOR
from anyattn.core.spec import Limits
from anyattn.core.traits import Determinism
from anyattn.core.wrappers.hybrid import Child, HybridBackend, VerifyRoute
from anyattn.core.wrappers.shape_router import ShapeRouter
from anyattn.errors import AnyattnError, BackendBuildError, FeatureError, PoolError

if TYPE_CHECKING:
    from anyattn.core.select.decision import Decision, PhaseChoice, Route

__all__ = ["create_backend", "create_draft_backend", "table_form"]

Choices = list[tuple[Phase, "PhaseChoice"]]


def table_form(form: FormSpec, kernel_page: int) -> TableForm:
    """The compiler's form of a catalog form; `kernel_page` fills in where the row leaves it open."""
    return TableForm(
        TableKind(form.kind),
        kernel_page=form.kernel_page or kernel_page,
        fill=form.fill,
        width_multiple=form.width_multiple,
        index_slack=form.index_slack,
        index_dtype=torch.int64 if form.index_dtype == "int64" else torch.int32,
    )


def create_backend(
    decision: Decision,
    pool: KVPool,
    table: RequestTable,
    *,
    verify: VerifyRoute | None = None,
    mla: MLAPolicy | None = None,
) -> AttentionBackend | HybridBackend:
    """Build what `decision` chose on one pool and request table.

    Args:
        verify: which of two different backends runs TARGET_VERIFY; default: as decided.
        mla: how the method of latent layers is chosen each step; default: whichever takes fewer operations.

    Raises:
        PoolError: a pool or table that isn't the decision's.
        BackendBuildError: a winner without an adapter, or whose class fails to load or build.
    """
    _check_types(decision, pool, table)
    _check_pool(decision, pool, table)
    backend: AttentionBackend | HybridBackend
    choices: Choices = [(Phase.PREFILL, decision.prefill), (Phase.DECODE, decision.decode)]
    drafting = decision.request.limits is not None and decision.request.limits.max_draft_tokens > 0
    if decision.verify is not None and (drafting or any(_same(decision.verify, c) for _, c in choices)):
        choices.append((Phase.VERIFY, decision.verify))
    chosen = len(choices)
    mixed: Choices = [] if decision.mixed is None else [(Phase.PREFILL, decision.mixed)]
    routed = [(route.role, member) for route in decision.routes for member in route.members]
    choices += [*mixed, *((_phase_of(role), member) for role, member in routed)]
    built = _build_all(decision, choices, pool, table)
    for each in built:
        each.mla.policy = mla or each.mla.policy
    roles = [Role.of(phase) for phase, _ in choices[:chosen]] + [Role.MIXED] * len(mixed)
    serving: dict[Role, Child] = dict(zip(roles, built, strict=False))
    backends = built[len(roles) :]
    members = [(role, each) for (role, _), each in zip(routed, backends, strict=True)]
    serving |= {route.role: _router(route, members) for route in decision.routes}
    prefill, decode = serving[Role.PREFILL], serving[Role.DECODE]
    verifier, mixer = serving.get(Role.VERIFY, prefill), serving.get(Role.MIXED, prefill)
    one = prefill is decode is verifier is mixer
    backend = built[0] if one else HybridBackend(prefill, decode, verify or verifier, mixed=mixer)
    backend.decision = decision
    return backend


def _phase_of(role: Role) -> Phase:
    """Whose rows serve a role: mixed steps are prefill's."""
    return Phase.PREFILL if role is Role.MIXED else Phase(role.value)


def _router(route: Route, members: Sequence[tuple[Role, AttentionBackend]]) -> ShapeRouter:
    """The router of a role's steps."""
    return ShapeRouter([each for role, each in members if role is route.role], route.rules)


def create_draft_backend(
    decision: Decision, pool: KVPool, table: RequestTable, *, branches: int = 1
) -> AttentionBackend | HybridBackend:
    """The backend of a draft model, chosen for that role (`decision.draft`), on the draft's pool.

    It serves DECODE and DRAFT_EXTEND; the draft's own prefill goes where `decision.prefill` says.

    Args:
        decision: made for the draft model's layers.
        branches: draft decode steps run this many branches a request (`DraftInfo`). More than one need
            slots that lie anywhere: the backend is built for a token-granular table, alone.

    Raises:
        SelectionError: no backend can draft. PoolError, BackendBuildError: as `create_backend`.
        FeatureError: a backend that reads pages and is to run more than one branch.
    """
    _check_pool(decision, pool, table)
    choice = decision.phase(Phase.DRAFT)
    if branches > 1:
        choice = _token_granular(choice, pool)
    choices: Choices = [(Phase.DECODE, choice), (Phase.DRAFT, choice)]
    if branches > 1:
        drafter = _build_all(decision, choices, pool, table)[0]
        drafter.decision = decision
        return drafter
    built = _build_all(decision, [(Phase.PREFILL, decision.prefill), *choices], pool, table)
    prefill, draft = built[0], built[-1]
    backend = draft if prefill is draft else HybridBackend(prefill, draft, "prefill", draft)
    backend.decision = decision
    return backend


def _token_granular(choice: PhaseChoice, pool: KVPool) -> PhaseChoice:
    """The choice with a table of single slots. Raises `FeatureError` where its kernel reads pages."""
    form, pages = choice.row.form, choice.row.pages
    token_major = pool.layout in TOKEN_MAJOR or form.kind in ("token_csr", "request_table")
    if pool.page_size > 1 and not (form.kernel_page in (0, 1) and pages.allows(1) and token_major):
        raise FeatureError(
            f"{choice.backend} reads whole pages: branches of a draft lie in slots of any page",
            asked=f"several branches on pages of {pool.page_size} ({pool.layout})",
            allowed="one branch, pages of 1, or a backend that reads slots",
            hint='select(..., draft="torch_native"), or page_size=1 for the draft\'s pool',
        )
    return replace(choice, kernel_page=1)


def _build_all(
    decision: Decision, choices: Choices, pool: KVPool, table: RequestTable
) -> list[AttentionBackend]:
    """A backend for each choice: one object for all with the same class, page and table form.

    Each phase keeps its row.
    """
    built: list[AttentionBackend] = []
    for place, (phase, choice) in enumerate(choices):
        alike = [i for i, (_, other) in enumerate(choices) if _same(other, choice)]
        if alike[0] < place:
            built.append(built[alike[0]])
            continue
        rows = {choices[i][0]: choices[i][1].row for i in reversed(alike)}
        built.append(_build(decision, choice, rows, phase, pool, table))
    bind_and_verify_backends(dict.fromkeys(built), pool, table)
    return built


def _same(a: PhaseChoice, b: PhaseChoice) -> bool:
    """One object serves both phases if name, class, page and table form agree."""
    return (a.backend, a.target, a.kernel_page, a.row.form) == (
        b.backend,
        b.target,
        b.kernel_page,
        b.row.form,
    )


def _check_types(decision: Decision, pool: KVPool, table: RequestTable) -> None:
    hint = "create_backend(decision, pool, table)"
    check_instance("pool of the backend", pool, KVPool, hint, error=PoolError)  # type: ignore[type-abstract]
    check_instance("request table of the backend", table, RequestTable, hint, error=PoolError)
    if not hasattr(decision, "kv"):
        asked = type(decision).__name__
        raise BackendBuildError("decision of the backend", asked=asked, allowed="Decision", hint=hint)


def _check_pool(decision: Decision, pool: KVPool, table: RequestTable) -> None:
    have = (pool.page_size, pool.layout, pool.kv_dtype)
    want = (decision.kv.page_size, decision.kv.layout, torch_dtype(decision.kv.dtype))
    if have != want:
        raise PoolError(
            "the pool isn't the one that was decided (page size, layout, KV dtype)",
            asked=have,
            allowed=want,
            hint="anyattn.kv.create_pool(decision, num_slots=…)",
        )
    if pool.specs != decision.request.specs:
        raise PoolError(
            "the pool was made for other layers",
            asked=f"{len(pool.specs)} layers, not as decided",
            allowed=f"the {len(decision.request.specs)} of the decision",
            hint="create the pool from the same decision",
        )
    if table.device != pool.device:
        raise PoolError(
            "request table and pool on different devices",
            asked=table.device,
            allowed=pool.device,
            hint=f"RequestTable(device={str(pool.device)!r})",
        )


def _build(
    decision: Decision,
    choice: PhaseChoice,
    rows: dict[Phase, CapabilityRow],
    phase: Phase,
    pool: KVPool,
    table: RequestTable,
) -> AttentionBackend:
    if choice.target is None:
        raise BackendBuildError(
            f"{choice.backend} was decided for {phase.value} but has no adapter here",
            asked=choice.backend,
            hint="decide on the real host (without host=…), or choose another backend",
        )
    config = _config(decision, choice, rows, pool, table)
    try:
        built = load_target(choice.target, choice.backend)(config)
    except AnyattnError:
        raise
    except (Exception, SystemExit) as error:  # vendor imports raise anything: make it one typed error
        raise BackendBuildError(
            f"{choice.backend} could not be built: {type(error).__name__}: {error}",
            asked=choice.target,
            hint=f"`anyattn doctor --probe` shows what is wrong with {choice.backend}'s library",
        ) from error
    assert isinstance(built, AttentionBackend)
    return built


def _config(
    decision: Decision,
    choice: PhaseChoice,
    rows: dict[Phase, CapabilityRow],
    pool: KVPool,
    table: RequestTable,
) -> BackendConfig:
    request = decision.request
    limits = request.limits or Limits(
        table.max_requests, max(1, pool.num_slots), table.max_context, max_draft_tokens=table.max_context
    )
    return BackendConfig(
        name=choice.backend,
        groups=GroupSet.from_specs(request.specs, pool.full_to_window),
        pool=pool,
        table=table,
        limits=limits,
        form=table_form(choice.row.form, choice.kernel_page),
        row=choice.row,
        rows=rows,
        dtype=torch_dtype(request.dtype),
        deterministic=Determinism(request.deterministic),
        provider=serving_provider(choice.row, decision.host),
    )
