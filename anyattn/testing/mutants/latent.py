"""Do latent cases notice? As `hunt`, over a few steps of DeepSeek's sizes, named for what they show."""

from __future__ import annotations

import random
import traceback
import warnings
from collections.abc import Mapping, Sequence

from anyattn.errors import UnknownNameError
from anyattn.testing.mla_cases import MLACase
from anyattn.testing.mla_declared import LatentDeclared, latent_declared
from anyattn.testing.mla_judge import check_mla_case
from anyattn.testing.mutants.hunt import Caught
from anyattn.testing.mutants.latent_calls import LATENT_MUTANTS
from anyattn.testing.mutants.patching import Mutant, MutantError, applied

__all__ = ["hunt_latent", "hunt_latents", "latent_cases"]

_SIZES = {"rank": 512, "rope": 64, "nope": 128, "v_dim": 128, "num_q_heads": 16, "page_size": 64}
_DRAWS = 8
_CASES: dict[str, dict[str, object]] = {
    "decode": {"mode": "decode", "prefix_lens": (70, 5, 130), "extend_lens": (1, 1, 1)},
    "chain of drafts": {"mode": "verify", "prefix_lens": (70, 9), "extend_lens": (5, 5)},
    "softmax scale": {"mode": "decode", "prefix_lens": (70, 5), "extend_lens": (1, 1), "scale": 0.2},
    "decode in a window": {"mode": "decode", "prefix_lens": (70, 9), "extend_lens": (1, 1), "window": 5},
    "fp8 latents with a scale": {
        "mode": "decode",
        "prefix_lens": (70, 5),
        "extend_lens": (1, 1),
        "kv_dtype": "float8_e4m3fn",
        "kv_scale": 0.25,
    },
    "fp8 latents of AMD's older chips with a scale": {
        "mode": "decode",
        "prefix_lens": (70, 5),
        "extend_lens": (1, 1),
        "kv_dtype": "float8_e4m3fnuz",
        "kv_scale": 0.25,
    },
    "few heads": {"mode": "decode", "prefix_lens": (70, 5), "extend_lens": (1, 1), "num_q_heads": 8},
    "prefill, expanded": {
        "mode": "extend",
        "prefix_lens": (70, 0),
        "extend_lens": (3, 6),
        "method": "materialised",
        "scale": 0.2,
    },
}


def latent_cases(declared: LatentDeclared) -> Mapping[str, MLACase]:
    """The cases that the backend declares, by what they show."""
    found: dict[str, MLACase] = {}
    for name, fields in _CASES.items():
        given = {**_SIZES, "dtype": "bfloat16", "kv_dtype": "bfloat16", "seed": 1, **fields}
        case = MLACase(**given)  # type: ignore[arg-type]
        for draw in range(_DRAWS):  # rows are drawn, and what one lacks another may have
            fitted = declared.fitted(case, random.Random(f"{name}/{draw}"))
            if fitted is not None and all(getattr(fitted, k) == v for k, v in fields.items()):
                found[name] = fitted
                break
    return found


def hunt_latents(
    backend: str, device: str, host: str | None = None, mutants: Sequence[Mutant] | None = None
) -> list[Caught]:
    """Every mutant of the backend's latent calls (or those given); `host`: emulated, stand-ins in place.

    Raises:
        UnknownNameError: the backend has no latent mutants. SelectionError: as `latent_declared`.
    """
    declared = latent_declared(backend, device, host)
    name = declared.record.name
    if mutants is None and name not in LATENT_MUTANTS:
        raise UnknownNameError("backend with mutants on latent models", name, LATENT_MUTANTS)
    cases = latent_cases(declared)
    return [hunt_latent(m, cases, name, device, host) for m in mutants or LATENT_MUTANTS[name]]


def hunt_latent(
    mutant: Mutant, cases: Mapping[str, MLACase], backend: str, device: str, host: str | None
) -> Caught:
    """One mutant: cases that name its fault first."""
    unnamed = 0
    try:
        with applied(mutant), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for label in sorted(cases, key=lambda name: not _named(mutant, name)):
                why = _failure(cases[label], backend, device, host)
                if why is not None and _named(mutant, f"{label}: {why}"):
                    return Caught(mutant.name, mutant.report, label, why, unnamed)
                unnamed += why is not None
    except MutantError as error:
        return Caught(mutant.name, mutant.report, why=" ".join(str(error).split()))
    return Caught(mutant.name, mutant.report, unnamed=unnamed)


def _failure(case: MLACase, backend: str, device: str, host: str | None) -> str | None:
    try:
        report = check_mla_case(case, backend=backend, device=device, host=host)
    except Exception as error:  # a crash notices too
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].name}, line {frames[-1].lineno}" if frames else "?"
        return f"{type(error).__name__} in {where}: {' '.join(str(error).split())[:300]}"
    return None if report.passed else " ".join(str(report).split())


def _named(mutant: Mutant, text: str) -> bool:
    return any(word in text for word in mutant.names)
