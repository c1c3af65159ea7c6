"""From a bench result to a table: times of backends, by bucket, without peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from anyattn.core.measure.bucket import Bucket, Role, Shape, power_of_two
from anyattn.core.measure.table import MeasuredTable, Provenance, Times, Timing, combined
from anyattn.errors import ConfigError

__all__ = ["BENCH_SCHEMA", "from_bench"]

BENCH_SCHEMA = "anyattn.bench/1"

_ROLES = {"decode": Role.DECODE, "extend": Role.PREFILL, "mixed": Role.MIXED, "verify": Role.VERIFY}
"""Role of a cell by its kind of step."""


def from_bench(data: Any, *, arch: str = "", command: str = "", units: int | None = None) -> MeasuredTable:
    """The table of a bench result.

    A cell counts where two backends or more were timed: one time alone says nothing. Cells of one bucket
    become one entry (`table.combined`).

    Args:
        arch: `platform:arch`, where the result doesn't say it. command: what produced it, likewise.
        units: SMs, CUs or cores of the device.

    Raises:
        ConfigError: another schema, fields that don't fit, or nothing that compares two backends.
    """
    schema = data.get("schema") if isinstance(data, Mapping) else f"a {type(data).__name__}"
    if schema != BENCH_SCHEMA:
        hint = "write one with `anyattn bench --out FILE`"
        raise ConfigError("schema of a bench result", asked=repr(schema), allowed=BENCH_SCHEMA, hint=hint)
    cells: dict[Bucket, list[Times]] = {}
    try:
        for entry in data["cells"]:
            bucket, times = _bucket(entry), _times(entry["results"])
            if bucket is not None and len(times) > 1:
                cells.setdefault(bucket, []).append(times)
        provenance = _provenance(data, arch, command, units)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        asked = f"{type(error).__name__}: {error}"
        raise ConfigError("fields of a bench result", asked=asked, allowed="as saved") from error
    if not cells:
        hint = (
            "time two backends or more: `anyattn bench` without --only and --skip, on a CPU or GPU with two"
        )
        raise ConfigError("no cell compares two backends", asked=f"{len(data['cells'])} cells", hint=hint)
    return MeasuredTable(provenance, {bucket: combined(found) for bucket, found in cells.items()})


def _provenance(data: Mapping[str, Any], arch: str, command: str, units: int | None) -> Provenance:
    where = str(data.get("arch") or arch)
    return Provenance(
        device=str(data["device"]),
        arch=where if ":" in where else arch,
        versions={str(name): str(version) for name, version in data["versions"].items() if version},
        date=str(data["date"])[:10],
        commit=str(data.get("commit") or ""),
        command=str(data.get("command") or command),
        units=data.get("units", units),
    )


def _bucket(entry: Mapping[str, Any]) -> Bucket | None:
    cell = entry["cell"]
    step = cell.get("step") or ("decode" if cell["new"] == 1 else "extend")
    if step not in _ROLES:
        return None
    new, prompts = _prompts(cell) if step == "mixed" else (cell["new"], 0)
    mla = (cell["dim"], cell["num_kv"]) == (576, 1) and cell["v_dim"] == 512
    window = cell.get("window")
    shape = Shape(
        q_heads=cell["num_q"], kv_heads=cell["num_kv"], head_dim=cell["dim"], v_head_dim=cell["v_dim"],
        dtype=cell["dtype"], kv_dtype=cell["kv_dtype"], mla=mla,
        window=None if window is None else power_of_two(window),
    )  # fmt: skip
    return Bucket(
        role=_ROLES[step], shape=shape, page=cell["page"], layout=_layout(entry["results"]),
        run=entry["mode"], requests=cell["batch"], kv_len=cell["prefix"] + cell["new"],
        new_tokens=new, prompts=prompts,
    )  # fmt: skip


def _prompts(cell: Mapping[str, Any]) -> tuple[int, int]:
    """(mean new tokens, number) of a mixed cell's requests that don't decode."""
    pairs = cell.get("lengths") or [(cell["prefix"], cell["new"])] * cell["batch"]
    chunks = [new for _, new in pairs if new > 1] or [cell["new"]]
    return round(sum(chunks) / len(chunks)), len(chunks)


def _layout(results: Any) -> str:
    """That most backends read; who reads another one had a pool of its own."""
    found = Counter(str(r.get("layout", "NHD")) for r in results if r["kind"] == "backend")
    return found.most_common(1)[0][0] if found else "NHD"


def _times(results: Any) -> dict[str, Timing]:
    ours = [r for r in results if r["kind"] == "backend" and r.get("counts", True)]
    return {str(r["name"]): Timing(float(r["median_s"]), float(r["spread"])) for r in ours}
