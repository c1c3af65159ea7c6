"""Every row of the catalog is well formed; importing it costs nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import anyattn
from anyattn.catalog import architectures, records
from anyattn.core.capabilities import BackendRecord, CapabilityRow, Feature, ModelKind, Phase, Proof
from anyattn.core.registry import Registry
from anyattn.detect.known import KNOWN
from anyattn.detect.simulated import HOSTS

ROWS = [(record, row) for record in records() for row in record.rows]
each_record = pytest.mark.parametrize("record", records(), ids=lambda r: r.name)

MISSION = {
    "torch_native",
    "triton",
    "flex_attention",
    "flashinfer",
    "fa3",
    "fa4",
    "flashmla",
    "trtllm_mha",
    "trtllm_mla",
    "cutedsl_mla",
    "hpc_ops",
    "wave",
    "aiter",
    "ascend",
    "intel_amx",
    "dsa",
    "qsa",
    "dsv4",
    "minimax_sparse",
    "gdn",
    "kda",
    "lightning",
    "mamba2",
    "short_conv",
}
DTYPES = {"float32", "bfloat16", "float16"}
KV_DTYPES = DTYPES | {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"}


def test_every_backend_has_a_record_with_rows() -> None:
    assert {record.name for record in records()} == MISSION
    assert all(record.rows and record.summary for record in records())


def test_names_and_aliases_are_unique() -> None:
    names = [name for r in records() for name in (r.name, *r.deprecated_aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("old", "new"), [("tokenspeed_mla", "cutedsl_mla"), ("nsa", "dsa")])
def test_deprecated_aliases_resolve_and_warn(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=new):
        assert Registry(records()).get(old).name == new


def test_architectures_are_those_that_can_be_simulated() -> None:
    assert set(architectures.KNOWN) == set(HOSTS)
    assert len(set(architectures.KNOWN)) == len(architectures.KNOWN)


def test_targets_are_classes_of_this_package_for_kinds_that_have_rows() -> None:
    root = Path(anyattn.__file__).parents[1]
    for record in records():
        assert set(record.targets) <= record.row_kinds()
        for target in record.targets.values():
            module, _, name = target.partition(":")
            source = (root / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
            assert f"class {name}(" in source, target


def test_the_reference_is_built() -> None:
    found = next(record for record in records() if record.name == "torch_native")
    assert found.targets[ModelKind.DENSE] == "anyattn.backends.reference.torch_native:TorchNative"


def test_no_torch_and_no_vendor_library_is_imported() -> None:
    code = (
        "import sys, anyattn.catalog, anyattn.platforms\n"
        "anyattn.catalog.records(); [anyattn.platforms.preferences(p) for p in anyattn.platforms.PLATFORMS]\n"
        "heavy = {'torch', 'triton', 'numpy', 'flashinfer', 'aiter', 'torch_npu', 'vllm'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _check_form(row: CapabilityRow) -> None:
    assert row.source.strip(), "every row says where its facts come from"
    assert row.method.strip(), "the decision shows which inner kernel runs"
    assert row.phases
    assert len(row.kinds) == 1
    named = set(row.architectures) - set(architectures.ANY_ACCELERATOR)
    assert named <= set(architectures.KNOWN)
    assert len(named) == len(row.architectures) or not row.providers + row.requires
    assert len(set(row.architectures)) == len(row.architectures)
    assert set(row.dtypes) <= DTYPES
    assert set(row.kv_dtypes) <= KV_DTYPES
    assert row.dtypes
    assert row.kv_dtypes
    assert row.layouts
    assert len(set(row.features)) == len(row.features)
    assert row.determinism in (0, 1, 2)
    assert row.host_lengths in (0, 1, 2)
    assert row.graph in (0, 1, 2)
    assert row.head_dims.pairs or row.head_dims.maximum


def _check_pages(row: CapabilityRow) -> None:
    fixed = row.form.kernel_page or (1 if row.form.kind == "token_csr" else 0)
    pages = [fixed] if fixed else [p for p in (1, 16, 32, 64, 128, 256) if row.pages.allows(p)]
    assert pages
    assert all(row.pages.allows(page) for page in pages)


@each_record
def test_rows_are_well_formed(record: BackendRecord) -> None:
    for row in record.rows:
        _check_form(row)
        _check_pages(row)


def _check_libraries(row: CapabilityRow) -> None:
    for provider in (*row.providers, *row.requires):
        library = KNOWN[provider.distribution]
        assert set(provider.modules) <= set(library.modules)
        SpecifierSet(provider.versions)
        platforms = {name.partition(":")[0] for name in row.architectures}
        assert platforms <= set(library.platforms), provider.distribution
    SpecifierSet(row.runtime)


def _check_recorded(row: CapabilityRow) -> None:
    """A row that even the recorded release can't serve would be dead; AITER's main branch is newer."""
    for provider in row.providers:
        recorded = KNOWN[provider.distribution].recorded
        if recorded is None or provider.versions == ">=0.1.20.dev0":
            continue
        assert SpecifierSet(provider.versions).contains(recorded, prereleases=True), provider


@each_record
def test_libraries_are_known_and_in_range(record: BackendRecord) -> None:
    for row in record.rows:
        _check_libraries(row)
        _check_recorded(row)


def test_nothing_is_called_proven_that_was_not_run() -> None:
    for record, row in ROWS:
        wanted = Proof.UNTESTED
        portable = record.name in ("torch_native", "flex_attention")
        if portable and all(a.startswith("cpu:") for a in row.architectures):
            wanted = Proof.CPU
        if record.name == "torch_native" and row.architectures == architectures.SM90:
            wanted = Proof.HARDWARE
        if record.name == "intel_amx" and row.method != "vllm-cpu amx":
            wanted = Proof.CPU
        if record.name == "triton":
            on_chip = row.architectures == architectures.SM90
            wanted = Proof.HARDWARE if on_chip else Proof.INTERPRETER
        on_hopper = row.architectures == architectures.SM90
        if [p.distribution for p in row.providers] == ["tokenspeed-fa3"]:
            wanted = Proof.HARDWARE
        if record.name in ("flashinfer", "flashmla", "flex_attention", "fa4", "trtllm_mha") and on_hopper:
            wanted = Proof.HARDWARE
        if record.name == "triton" and row.kinds == (ModelKind.DENSE,):
            wanted = _triton_proof(row)
        assert row.proof is wanted, record.name


def _triton_proof(row: CapabilityRow) -> Proof:
    """Run on an H200; else what the compile table has a row for."""
    if row.architectures == architectures.SM90:
        return Proof.HARDWARE
    table = (Path(__file__).parents[2] / "docs" / "compile-table.md").read_text(encoding="utf-8")
    names = [chip.partition(":")[2].replace("sm", "sm_") for chip in row.architectures]
    listed = {name in re.findall(r"sm_\d+|gfx\w+", table) for name in names}
    assert len(listed) == 1, f"one way of proof a row: {names}"
    return Proof.CROSS_COMPILED if listed.pop() else Proof.UNTESTED


def test_dtype_and_kv_dtype_go_together() -> None:
    """No row of a vendor lets a bf16 model onto an fp16 pool; recurrent states have dtypes of their own."""
    for record, row in ROWS:
        if record.name != "torch_native" and row.kinds != (ModelKind.LINEAR,):
            assert len(row.dtypes) == 1, record.name
            assert set(row.kv_dtypes) & DTYPES <= set(row.dtypes), record.name


def _phases(record: BackendRecord, kind: ModelKind, chip: str) -> set[Phase]:
    rows = [r for r in record.rows if kind in r.kinds and chip in r.architectures]
    return {phase for row in rows for phase in row.phases}


@each_record
def test_a_draft_backend_can_run_every_step_of_a_draft(record: BackendRecord) -> None:
    for kind in record.row_kinds():
        for chip in architectures.KNOWN:
            phases = _phases(record, kind, chip)
            if Phase.DRAFT in phases:
                assert {Phase.PREFILL, Phase.DECODE} <= phases, (kind, chip)


@pytest.mark.parametrize("chip", HOSTS)
def test_the_reference_serves_every_phase_on_every_chip(chip: str) -> None:
    record = next(r for r in records() if r.name == "torch_native")
    assert _phases(record, ModelKind.DENSE, chip) == set(Phase)
    features = {f for row in record.rows if chip in row.architectures for f in row.features}
    assert {Feature.WINDOW, Feature.SINKS, Feature.EXPLICIT_MASK, Feature.CROSS} <= features


def test_degraded_texts_say_why() -> None:
    texts = {row.degraded for _, row in ROWS if row.degraded is not None}
    assert texts
    assert all(len(text) > 10 and not re.search(r"\bTODO\b", text) for text in texts)
