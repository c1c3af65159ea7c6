"""What the commands say about a vendor's package, good and broken, from a process of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from plugin_tools import call, install

OLD = {"records.py": ("CONTRACT = 1", "CONTRACT = 0")}
REMEDY = "pip install --upgrade anyattn-lumen"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("good") / "site")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("broken") / "site", OLD)


def test_select_explains_a_choice_of_the_plugin(good: Path) -> None:
    done = call(good, "select", "--assume", "lumen:l2")
    assert done.returncode == 0, done.stderr
    assert "prefill  lumen_flash" in done.stdout
    assert "decode   lumen_stream" in done.stdout
    assert "not measured: the chip is imaginary" in done.stdout


def test_the_device_is_taken_where_it_is_found(good: Path) -> None:
    """Unasked where there is only a CPU, and by its name; never where nothing is."""
    unasked = json.loads(call(good, "select", "--json", LUMEN_SIMULATOR="l1").stdout)
    assert (unasked["host"]["platform"], unasked["host"]["arch"]) == ("lumen", "l1")
    assert unasked["request"]["device"] == "cpu"
    named = json.loads(call(good, "select", "--json", "--device", "lumen", LUMEN_SIMULATOR="l2").stdout)
    assert named["decode"]["backend"] == "lumen_stream"
    cpu = json.loads(call(good, "select", "--json", "--device", "cpu", LUMEN_SIMULATOR="l2").stdout)
    assert cpu["host"]["platform"] == "cpu"
    absent = call(good, "select", "--device", "lumen")
    assert absent.returncode == 2
    assert "the device isn't there: 0 visible of lumen" in absent.stderr


def test_doctor_lists_plugins(good: Path) -> None:
    text = call(good, "doctor", LUMEN_SIMULATOR="l1").stdout
    assert "Lumen L1 (lumen:l1)" in text
    assert "loaded    lumen            platform of anyattn-lumen 0.1.0" in text
    assert "ready     lumen_flash" in text


def test_doctor_reports_a_broken_plugin_with_the_remedy(broken: Path) -> None:
    text = call(broken, "doctor").stdout
    assert "broken    lumen_flash      backend of anyattn-lumen 0.1.0" in text
    assert "written for contract 0" in text
    assert REMEDY in text.partition("Next step")[2]
    report = json.loads(call(broken, "doctor", "--json").stdout)
    states = {entry["name"]: entry["state"] for entry in report["plugins"]}
    assert states == {"lumen": "broken", "lumen_flash": "broken", "lumen_stream": "broken"}


def test_backends_reports_a_broken_plugin(broken: Path) -> None:
    done = call(broken, "backends", "--assume", "cpu:amx")
    assert f"backend plugin lumen_flash of anyattn-lumen 0.1.0 is broken: {OLD and 'written'}" in done.stdout
    why = call(broken, "backends", "--assume", "cpu:amx", "--why", "lumen_flash").stdout
    assert "plugin_broken: asked written for contract 0" in why
    assert f"next: {REMEDY}" in why


def test_select_reports_a_broken_plugin(broken: Path) -> None:
    done = call(broken, "select", "--assume", "cpu:amx")
    assert done.returncode == 0, done.stderr
    assert "lumen_flash    broken plugin: written for contract 0" in done.stdout
    assert "note" in done.stdout
    asked = call(broken, "select", "--assume", "cpu:amx", "--backend", "lumen_flash")
    assert asked.returncode == 2
    assert "written for contract 0" in asked.stderr
    assert REMEDY in asked.stderr
    data = json.loads(call(broken, "select", "--assume", "cpu:amx", "--json").stdout)
    codes = {
        reason["code"]
        for candidate in data["candidates"]
        if candidate["backend"] == "lumen_flash"
        for reason in candidate["reasons"]
    }
    assert codes == {"plugin_broken"}


def test_a_list_that_names_nothing_is_a_problem_that_doctor_survives(good: Path) -> None:
    done = call(good, "doctor", ANYATTN_PLUGINS="anyattn-lumne")
    assert done.returncode == 0, done.stderr
    assert "did you mean 'anyattn-lumen'?" in done.stdout
    assert call(good, "select", "--assume", "cpu:amx", ANYATTN_PLUGINS="anyattn-lumne").returncode == 2


def test_verify_names_the_fault_of_a_broken_plugin(broken: Path) -> None:
    for how in ([], ["--graphs"], ["--latent"]):
        done = call(broken, "verify", "lumen_flash", *how)
        assert done.returncode == 2
        assert "its plugin is broken; asked: written for contract 0" in done.stderr
        assert REMEDY in done.stderr


def test_a_device_of_a_plugin_that_was_not_loaded_is_refused_with_the_reason(
    good: Path, broken: Path
) -> None:
    done = call(broken, "select", "--device", "lumen")
    assert done.returncode == 2
    assert "platform lumen is brought by anyattn-lumen 0.1.0, which is broken" in done.stderr
    assert REMEDY in done.stderr
    denied = call(good, "select", "--device", "lumen", ANYATTN_PLUGINS="none")
    assert denied.returncode == 2
    assert "which is denied" in denied.stderr
    assert "add anyattn-lumen to ANYATTN_PLUGINS" in denied.stderr


def test_graphs_of_a_plugins_platform_are_verified(good: Path) -> None:
    done = call(good, "verify", "lumen_flash", "--graphs", "--device", "lumen", LUMEN_SIMULATOR="l1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lumen_flash on lumen:l1, graphs of lumen: 13 passed, 0 failed" in done.stdout
    data = json.loads(call(good, "verify", "lumen_stream", "--graphs", "--json", LUMEN_SIMULATOR="l2").stdout)
    assert (data["failed"], data["emulated"]) == (0, False)
    assert data["passed"] > 0


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (('    graph="anyattn_lumen.graphs:LumenGraphs",\n', ""), "platform lumen has no graphs"),
        (('graph=2,\n            tolerates_nan_tail=True,\n            method="flash', 'method="flash'),
         "lumen_flash declares no graphs on lumen:l1"),
    ],
)  # fmt: skip
def test_graphs_that_nobody_declares_are_refused(edit: tuple[str, str], message: str, tmp_path: Path) -> None:
    site = install(tmp_path / "site", {"records.py": edit})
    done = call(site, "verify", "lumen_flash", "--graphs", LUMEN_SIMULATOR="l1")
    assert done.returncode == 2
    assert message in done.stderr


def test_metadata_that_outlives_a_renamed_package_is_named(tmp_path: Path) -> None:
    site = install(tmp_path / "site")
    shutil.rmtree(site / "anyattn_lumen")
    said = call(site, "select", "--assume", "cpu:amx", "--backend", "lumen_flash").stderr
    assert "if it was renamed, pip uninstall anyattn-lumen" in said
    (info,) = site.glob("*.dist-info")
    (info / "METADATA").rename(info / "PKG-INFO")
    info.rename(site / "anyattn_lumen.egg-info")
    said = call(site, "select", "--assume", "cpu:amx", "--backend", "lumen_flash").stderr
    assert f"delete its .egg-info in {site}" in said


def test_a_class_that_breaks_while_building_is_one_typed_error(tmp_path: Path) -> None:
    site = install(tmp_path / "site", {"flash.py": ("import math", "import liblumen_native")})
    done = call(site, "verify", "lumen_flash", "--device", "lumen", LUMEN_SIMULATOR="l1")
    assert done.returncode != 0
    assert "the class of lumen_flash can't be loaded" in done.stdout + done.stderr
    assert "`python -c 'import anyattn_lumen.flash'` says more" in done.stdout + done.stderr
