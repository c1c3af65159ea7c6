"""The default decision for a few models on every simulated host: names and pool, as a table."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from anyattn.core.spec import AttentionSpec, MLASpec
from anyattn.errors import SelectionError

__all__ = [
    "MODELS",
    "Default",
    "changed_defaults",
    "decisions_page",
    "defaults",
    "defaults_csv",
    "read_defaults",
]

MODELS: dict[str, tuple[str, AttentionSpec]] = {
    "dense": ("32/8 heads of 128", AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)),
    "window": (
        "32/8 heads of 128, window 4096",
        AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, sliding_window=4096),
    ),
    "sinks": (
        "64/8 heads of 64 with sinks",
        AttentionSpec(num_q_heads=64, num_kv_heads=8, head_dim=64, sinks=True),
    ),
    "mla": (
        "128 latent heads, 512 + 64",
        AttentionSpec(
            num_q_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5, mla=MLASpec()
        ),
    ),
}
"""Name -> (in words, one layer)."""

_FLOAT32 = ("cpu:avx2", "cpu:arm", "cpu:generic")


@dataclass(frozen=True)
class Default:
    """What is chosen unasked for one model on one host, with the libraries recorded for it."""

    model: str
    host: str
    dtype: str
    prefill: str
    decode: str
    verify: str
    draft: str
    pool: str

    @property
    def key(self) -> tuple[str, str]:
        """What identifies it."""
        return self.model, self.host

    @property
    def choice(self) -> str:
        """All of it in a line."""
        return f"{self.prefill} / {self.decode} / {self.verify} / {self.draft}, {self.pool}"


@functools.cache
def defaults() -> tuple[Default, ...]:
    """All models on all simulated hosts of this package. Builds nothing."""
    from anyattn.detect import HOSTS

    return tuple(_default(model, host) for model in MODELS for host in HOSTS)


def _default(model: str, host: str) -> Default:
    from anyattn.api import select

    dtype = "float32" if host in _FLOAT32 else "float16" if host == "ascend:310p" else "bfloat16"
    try:
        made = select(MODELS[model][1], dtype=dtype, host=host)
    except SelectionError:
        return Default(model, host, dtype, "nobody", "nobody", "nobody", "nobody", "none")
    names = [choice.backend if choice else "nobody" for choice in (made.verify, made.draft)]
    pool = f"pages of {made.kv.page_size}, {made.kv.layout}"
    return Default(model, host, dtype, made.prefill.backend, made.decode.backend, names[0], names[1], pool)


def defaults_csv(rows: Iterable[Default]) -> str:
    """The defaults as a table."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [f.name for f in fields(Default)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return out.getvalue()


def read_defaults(text: str) -> tuple[Default, ...]:
    """The defaults that `defaults_csv` wrote."""
    return tuple(Default(**row) for row in csv.DictReader(io.StringIO(text)))


def changed_defaults(before: Iterable[Default], after: Iterable[Default]) -> tuple[tuple[str, str, str], ...]:
    """(model on host, before, after) of every default that isn't what it was; new hosts are no change."""
    now = {row.key: row for row in after}
    return tuple(
        (f"{row.model} on {row.host}", row.choice, now[row.key].choice if row.key in now else "gone")
        for row in before
        if row.key not in now or now[row.key].choice != row.choice
    )


def decisions_page(rows: Sequence[Default]) -> str:
    """Sections of `docs/matrix.md`, one a model."""
    lines: list[str] = []
    for model, (words, _) in MODELS.items():
        lines += ["", f"### {model}: {words}", ""]
        lines += [
            "| host | prefill | decode | verify | draft | pool |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        lines += [
            f"| {row.host} | {row.prefill} | {row.decode} | {row.verify} | {row.draft} | {row.pool} |"
            for row in rows
            if row.model == model
        ]
    return "\n".join(lines)
