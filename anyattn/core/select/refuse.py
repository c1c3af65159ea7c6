"""Errors of selection: what was asked, why it can't be, who could do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyattn.core.capabilities import Phase
from anyattn.core.facts import HostFacts
from anyattn.core.select.choices import Wishes
from anyattn.core.select.decision import Rejected, Verdict
from anyattn.core.select.joint import solve_joint
from anyattn.core.select.options import Field
from anyattn.core.select.pages import describe_pages
from anyattn.core.select.validate import distance
from anyattn.errors import SelectionError

__all__ = ["refuse_choices", "refuse_nobody", "refuse_pool"]

Fields = Mapping[Phase, Field]


def _reasons(verdict: Verdict) -> str:
    return "; ".join(map(str, verdict.reasons)) if isinstance(verdict, Rejected) else "passes on its own"


def _sources(fields: Sequence[Field]) -> str:
    return ", ".join(dict.fromkeys(f.choice.source for f in fields if f.choice is not None))


def _would_do(field: Field, fields: Fields, facts: HostFacts, wishes: Wishes) -> str | None:
    """The backend that selection would take for this phase, everything else being as asked."""
    others = {phase: f.relaxed() if f.choice and not f.options else f for phase, f in fields.items()}
    others[field.phase] = field.relaxed()
    required = frozenset({Phase.PREFILL, Phase.DECODE, field.phase})
    joint = solve_joint(
        others, required, platform=facts.platform, page_size=wishes.page_size, layout=wishes.layout
    )
    option = joint.of(field.phase) if joint is not None else None
    return option.record.name if option is not None else next(iter(field.names()), None)


def _advice(failing: Sequence[Field], fields: Fields, facts: HostFacts, wishes: Wishes) -> str:
    found = {f.phase.value: _would_do(f, fields, facts, wishes) for f in failing}
    named = [f"{phase}={name!r}" for phase, name in found.items() if name is not None]
    if not named:
        return "no other backend would do either; `anyattn backends` lists every reason"
    return f"the nearest that would do: {', '.join(named)}; or leave the choice open"


def _elsewhere(failing: Sequence[Field], fields: Fields) -> str:
    """Phases that the refused backend does serve, where it was named for all at once."""
    general = {f.choice.backend for f in failing if f.choice is not None and not f.choice.strict}
    served = [f"{p.value}={n!r}" for p, f in fields.items() for n in f.names() if n in general]
    return f"; {', '.join(served)} would pass" if served else ""


def refuse_choices(
    failing: Sequence[Field], fields: Fields, facts: HostFacts, wishes: Wishes
) -> SelectionError:
    """An explicit choice that doesn't pass, in one or more phases."""
    names = dict.fromkeys(f.choice.backend for f in failing if f.choice is not None)
    phases = ", ".join(f.phase.value for f in failing)
    why = {f.phase.value: _reasons(f.verdicts[f.choice.backend]) for f in failing if f.choice is not None}
    told = dict.fromkeys(why.values())
    details = next(iter(told)) if len(told) == 1 else " | ".join(f"{p}: {t}" for p, t in why.items())
    allowed = ", ".join(dict.fromkeys(name for f in failing for name in f.names())) or "none"
    hint = _advice(failing, fields, facts, wishes) + _elsewhere(failing, fields)
    return SelectionError(
        f"backend {', '.join(map(repr, names))} can't serve {phases} on {facts.target} ({details})",
        asked=", ".join(filter(None, [_sources(failing), *_pool_sources(wishes)])),
        allowed=allowed,
        hint=hint,
    )


def _pool_sources(wishes: Wishes) -> tuple[str, str]:
    return wishes.page_source, wishes.layout_source


def refuse_nobody(field: Field, facts: HostFacts, wishes: Wishes, limit: int = 4) -> SelectionError:
    """No backend passes in a phase: the nearest candidates with their reasons."""
    ordered = sorted(field.verdicts.items(), key=lambda item: distance(item[1]))
    nearest = [f"{name}: {_reasons(verdict)}" for name, verdict in ordered[:limit]]
    return SelectionError(
        f"no backend can serve {field.phase.value} on {facts.target} ({' | '.join(nearest)})",
        asked=", ".join(filter(None, _pool_sources(wishes))) or f"a backend for {field.phase.value}",
        allowed="what the reasons name, nearest first",
        hint="change what the nearest reasons name; `anyattn backends` lists every reason",
    )


def refuse_pool(fields: Fields, facts: HostFacts, wishes: Wishes) -> SelectionError:
    """Each phase has a backend, but they share no page size and layout."""
    chosen = [f for f in fields.values() if f.choice is not None and f.options]
    shown = chosen or [fields[Phase.PREFILL], fields[Phase.DECODE]]
    pools = [
        f"{f.phase.value} {o.record.name}: pages {describe_pages(o.row)}, layouts {', '.join(o.row.layouts)}"
        for f in shown
        for o in f.options[:1]
    ]
    asked = [_sources(chosen), *_pool_sources(wishes)]
    last = chosen[-1:]
    return SelectionError(
        "the phases share no KV page size and layout",
        asked=", ".join(filter(None, asked)) or "one pool for all phases",
        allowed="; ".join(pools),
        hint=_advice(last, fields, facts, wishes) if last else "leave page_size and layout open",
    )
