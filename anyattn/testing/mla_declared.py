"""What a backend declares for latent models on a chip, and cases cut down to it."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from anyattn import api
from anyattn.core.capabilities import BackendRecord, CapabilityRow, Feature, ModelKind, Phase
from anyattn.core.facts import HostFacts
from anyattn.core.mla import materialised_spec
from anyattn.core.select.libraries import library_reasons
from anyattn.core.select.pages import kernel_page
from anyattn.errors import SelectionError
from anyattn.testing.mla_cases import MLACase
from anyattn.testing.selecting import facts_of, refuse_broken

__all__ = ["LatentDeclared", "latent_declared"]

_PHASES = {
    "decode": Phase.DECODE,
    "extend": Phase.PREFILL,
    "mixed": Phase.PREFILL,
    "verify": Phase.VERIFY,
    "draft_extend": Phase.PREFILL,  # a backend that isn't a draft's runs it where it prefills
}
_PLAIN: dict[Feature, dict[str, object]] = {
    Feature.WINDOW: {"window": None},
    Feature.LOGIT_CAP: {"logit_cap": None},
    Feature.SINKS: {"sinks": False},
    Feature.LSE: {"return_lse": False},
    Feature.EXPLICIT_MASK: {"mask": None},
    Feature.KV_SCALES: {"kv_scale": 1.0},
    Feature.NO_CACHE_WRITE: {"kv": "write"},
    Feature.Q_ROPE: {"apart": False},
}
"""What a case is without a feature."""


@dataclass(frozen=True)
class LatentDeclared:
    """Latent rows of one backend that serve the host's chip."""

    record: BackendRecord
    facts: HostFacts
    rows: tuple[CapabilityRow, ...]

    def fitted(self, case: MLACase, rng: random.Random) -> MLACase | None:
        """The case without what no row declares; None where no row takes its dtypes or sizes.

        A mode of a phase that isn't served becomes one that is.
        """
        served = [mode for mode in _PHASES if self._rows(_PHASES[mode])]
        if case.mode not in served:
            case = _in_mode(case, rng.choice(served))
        rows = [row for row in self._rows(_PHASES[case.mode]) if _takes(row, case)]
        return _cut(case, rng.choice(rows), rng) if rows else None

    def _rows(self, phase: Phase) -> list[CapabilityRow]:
        return [row for row in self.rows if phase in row.phases]


def latent_declared(backend: str, device: str | None = None, host: str | None = None) -> LatentDeclared:
    """What `backend` declares for latent models on this machine, or on an emulated `host`.

    Raises:
        UnknownNameError: nobody registered that name.
        SelectionError: it serves no latent model on this chip, or has no adapter for any.
    """
    record = api.registry().get(backend)
    refuse_broken(record)
    facts = facts_of(device, host)
    rows = tuple(row for row in record.rows if ModelKind.MLA in row.kinds and row.serves(facts.target))
    if not rows or ModelKind.MLA not in record.targets:
        raise SelectionError(
            f"{record.name} can't be verified on latent models here",
            asked=f"rows of MLA for {facts.target}: {len(rows)}, adapter: {ModelKind.MLA in record.targets}",
            allowed="a backend that serves latent models on this chip",
            hint="`anyattn backends` lists what each chip can run",
        )
    # Cases come from the rows of the libraries that are there: others would be refused one by one.
    rows = tuple(row for row in rows if not library_reasons(row, facts)) or rows
    return LatentDeclared(record, facts, rows)


def _in_mode(case: MLACase, mode: str) -> MLACase:
    """The same requests in another kind of step."""
    lens = tuple(1 if mode == "decode" else max(1, min(6, n)) for n in case.extend_lens)
    return dataclasses.replace(case, mode=mode, extend_lens=lens, num_decode=0, mask=None, padding=0)


def _takes(row: CapabilityRow, case: MLACase) -> bool:
    spec = case.spec()
    full = materialised_spec(spec)
    sizes = [(spec.head_dim, spec.v_head_dim), (full.head_dim, full.v_head_dim)]
    allowed = sizes if Phase.PREFILL in row.phases else sizes[:1]
    return (
        case.dtype in row.dtypes
        and case.kv_dtype in row.kv_dtypes
        and any(row.head_dims.allows(*shape) for shape in allowed)
    )


def _cut(case: MLACase, row: CapabilityRow, rng: random.Random) -> MLACase:
    """The case as one row allows it."""
    changes: dict[str, object] = {}
    for feature, plain in _PLAIN.items():
        if feature not in row.features:
            changes |= plain
    if row.q_heads and case.num_q_heads not in row.q_heads:
        changes["num_q_heads"] = rng.choice(row.q_heads)
    layout = case.layout if case.layout in row.layouts else row.layouts[0]
    pages = [p for p in (1, 16, 32, 64, 128) if kernel_page(row, p, layout) is not None]
    if kernel_page(row, case.page_size, layout) is None:
        changes["page_size"] = rng.choice(pages)
    if case.mode == "verify" and Feature.RAGGED_VERIFY not in row.features:
        changes["extend_lens"] = (max(1, case.extend_lens[0]),) * case.batch_size
        changes["padding"] = 0
    return dataclasses.replace(case, layout=layout, **changes)  # type: ignore[arg-type]
