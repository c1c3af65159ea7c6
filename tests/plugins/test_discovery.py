"""Plugins are admitted, refused with a remedy, or denied by the environment: never absent."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from plugin_tools import install, points

from anyattn.api import make_request
from anyattn.core.capabilities import CONTRACT_VERSION
from anyattn.core.registry import Registry
from anyattn.core.select.solve import decide
from anyattn.core.spec import AttentionSpec
from anyattn.detect import PluginState, discover, simulate
from anyattn.detect.plugins import BUILT_IN, Plugins
from anyattn.errors import ConfigError

Edits = Mapping[str, tuple[str, str]]


@pytest.fixture(autouse=True)
def clean_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test imports its own copy of the package."""
    monkeypatch.delenv("ANYATTN_PLUGINS", raising=False)
    monkeypatch.delenv("ANYATTN_PLUGINS_DENIED", raising=False)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "anyattn_lumen":
            del sys.modules[name]


def found_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, edits: Edits | None = None, **environ: str
) -> Plugins:
    install(folder, edits)
    monkeypatch.syspath_prepend(str(folder))
    return discover(points(folder), environ)


def states(found: Plugins) -> dict[str, str]:
    return {report.name: report.state.value for report in found.reports}


def test_a_good_package_is_admitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_in(tmp_path / "site", monkeypatch)
    assert states(found) == {"lumen": "loaded", "lumen_flash": "loaded", "lumen_stream": "loaded"}
    assert found.backends["lumen_flash"].origin == "anyattn-lumen 0.1.0"
    assert found.targets[-2:] == ("lumen:l1", "lumen:l2")
    assert "anyattn_lumen.driver" not in sys.modules
    assert "anyattn_lumen.flash" not in sys.modules


def test_built_ins_come_through_the_same_door() -> None:
    found = discover(())
    assert {point.group for point in BUILT_IN} == {"anyattn.backends", "anyattn.platforms"}
    assert {"triton", "torch_native"} <= set(found.backends)
    assert list(found.platforms) == ["cuda", "rocm", "ascend", "cpu"]
    assert found.reports == []


def test_plain_torch_serves_a_platform_that_a_plugin_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = found_in(tmp_path / "site", monkeypatch)
    registry = Registry(found.records)
    assert any(row.serves("lumen:l1") for row in registry.get("torch_native").rows)
    assert not any(row.serves("lumen:l1") for row in registry.get("triton").rows)


def test_a_simulated_host_of_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = simulate("lumen:l2", found_in(tmp_path / "site", monkeypatch))
    assert (host.device_name, host.runtime, host.simulated) == ("Lumen L2", "1.0", True)


@pytest.mark.parametrize(
    ("libraries", "decode"), [("", "flashinfer"), ("-flashinfer-python-triton", "lumen_flash")]
)
def test_on_a_built_in_chip_a_plugin_comes_behind_all_but_slow_ones(
    libraries: str, decode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edits = {"records.py": ('_BOTH = ("lumen:l1", "lumen:l2")', '_BOTH = ("lumen:l1", "cuda:sm80")')}
    found = found_in(tmp_path / "site", monkeypatch, edits)
    spec = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    facts = simulate(f"cuda:sm80{libraries}", found)
    request = make_request(spec, dtype="bfloat16", device="cuda")
    decision = decide(request, facts, Registry(found.records), found.platform("cuda").preferences, environ={})
    assert decision.decode.backend == decode


BROKEN: dict[str, tuple[Edits, str, str]] = {
    "an old contract": (
        {"records.py": ("CONTRACT = 1", "CONTRACT = 0")},
        "written for contract 0",
        "pip install --upgrade anyattn-lumen",
    ),
    "a newer contract": (
        {"records.py": ("CONTRACT = 1", f"CONTRACT = {CONTRACT_VERSION + 1}")},
        f"written for contract {CONTRACT_VERSION + 1}",
        "pip install --upgrade anyattn,",
    ),
    "no contract": (
        {"records.py": ("    contract=CONTRACT,\n", "")},
        "a record without a contract version",
        "pip install --upgrade anyattn-lumen",
    ),
    "a chip that isn't": (
        {"records.py": ('_BOTH = ("lumen:l1", "lumen:l2")', '_BOTH = ("lumen:l1", "lumen:12")')},
        "rows for lumen:12",
        "did its authors mean 'lumen:l",
    ),
    "a family of chips": (
        {"records.py": ('_BOTH = ("lumen:l1", "lumen:l2")', '_BOTH = ("lumen:*",)')},
        "rows for lumen:*",
        "name each chip",
    ),
    "an import that fails": (
        {"records.py": ("from __future__ import annotations", "import liblumen_native")},
        "No module named 'liblumen_native' (records.py, line 7)",
        "pip install --force-reinstall anyattn-lumen",
    ),
    "an import that exits": (
        {"records.py": ("from __future__ import annotations", "raise SystemExit('no licence')")},
        "SystemExit: no licence",
        "pip install --force-reinstall anyattn-lumen",
    ),
    "no class": (
        {"records.py": ('targets={ModelKind.DENSE: "anyattn_lumen.flash:LumenFlash"}', "targets={}")},
        "a record without targets",
        "report it to its authors",
    ),
    "two names": (
        {"records.py": ('name="lumen_flash"', 'name="triton"')},
        "entry point 'lumen_flash' gives 'triton'",
        "report it to its authors",
    ),
    "an alias that is taken": (
        {"records.py": ('name="lumen_flash",', 'name="lumen_flash", deprecated_aliases=("triton",),')},
        "the name 'triton', which is anyattn's",
        "rename it in anyattn-lumen",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_backend_keeps_its_place_with_the_remedy(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edits, why, remedy = BROKEN[case]
    found = found_in(tmp_path / "site", monkeypatch, edits)
    reports = {report.name: report for report in found.reports}
    broken = reports["lumen_flash"]
    assert broken.state is PluginState.BROKEN
    assert broken.fault is not None
    assert why in broken.fault.found
    assert remedy in broken.fault.remedy
    stand_in = found.backends["lumen_flash"]
    assert stand_in.fault == broken.fault
    assert stand_in.rows == ()
    assert found.backends["triton"].origin == "anyattn"


def test_a_backend_whose_platform_is_broken_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edits = {"records.py": ('detect="anyattn_lumen.detection:look"', 'detect="anyattn_lumen.detection.look"')}
    found = found_in(tmp_path / "site", monkeypatch, edits)
    by_name = {report.name: str(report) for report in found.reports}
    assert "detect='anyattn_lumen.detection.look' (wants 'module:name')" in by_name["lumen"]
    assert "install or mend the plugin of platform 'lumen'" in by_name["lumen_flash"]


@pytest.mark.parametrize(
    ("environ", "state"),
    [
        ({}, "loaded"),
        ({"ANYATTN_PLUGINS": "anyattn-lumen"}, "loaded"),
        ({"ANYATTN_PLUGINS": "Anyattn_Lumen"}, "loaded"),
        ({"ANYATTN_PLUGINS": "none"}, "denied"),
        ({"ANYATTN_PLUGINS_DENIED": "anyattn-lumen, others"}, "denied"),
        ({"ANYATTN_PLUGINS_DENIED": "some-other-package"}, "loaded"),
    ],
)
def test_the_environment_lets_in_or_keeps_out(
    environ: dict[str, str], state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = found_in(tmp_path / "site", monkeypatch, **environ)
    assert set(states(found).values()) == {state}
    assert ("lumen_flash" in found.backends) == (state == "loaded")
    assert ("anyattn_lumen" in sys.modules) == (state == "loaded")  # what is denied isn't imported


@pytest.mark.parametrize("variable", ["ANYATTN_PLUGINS", "ANYATTN_PLUGINS_DENIED"])
def test_a_misspelt_distribution_is_an_error(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="did you mean 'anyattn-lumen'"):
        found_in(tmp_path / "site", monkeypatch, **{variable: "anyattn-lumne"})
