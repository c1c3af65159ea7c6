"""Ascend facts from fake device nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from detect_fakes import sources, write

from anyattn.detect.ascend import plain_version, read_ascend
from anyattn.detect.found import Found

INSTALL_INFO = "package_name=Ascend-cann-toolkit\nversion=8.2.RC1.alpha003\ninnerversion=V100R001\n"


def machine(root: Path, device: str = "0xd802", count: int = 4) -> Path:
    write(root, {f"/dev/davinci{i}": "" for i in range(count)})
    write(root, {"/dev/davinci_manager": ""})
    for i in range(8):
        folder = f"/sys/bus/pci/devices/0000:0{i}:00.0"
        write(root, {f"{folder}/vendor": "0x19e5\n", f"{folder}/device": f"{device}\n"})
    other = "/sys/bus/pci/devices/0000:aa:00.0"  # a network card of the same vendor
    write(root, {f"{other}/vendor": "0x19e5\n", f"{other}/device": "0x0222\n"})
    return root


@pytest.mark.parametrize(
    ("device", "arch"), [("0xd802", "910b"), ("0xd803", "910c"), ("0xd500", "310p"), ("0xd801", "910a")]
)
def test_architectures(tmp_path: Path, device: str, arch: str) -> None:
    found = read_ascend(sources(machine(tmp_path, device)))
    assert [d.arch for d in found.devices] == [arch] * 4
    assert found.present == 4


def test_versions(tmp_path: Path) -> None:
    toolkit = "/usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info"
    driver = "/usr/local/Ascend/driver/version.info"
    write(machine(tmp_path), {toolkit: INSTALL_INFO, driver: "Version=25.2.0\nascendhal_version=7\n"})
    found = read_ascend(sources(tmp_path))
    assert (found.runtime, found.driver, found.notes) == ("8.2rc1", "25.2.0", ())


def test_the_user_s_toolkit_counts_first(tmp_path: Path) -> None:
    write(
        machine(tmp_path),
        {
            "/usr/local/Ascend/ascend-toolkit/latest/x86_64-linux/ascend_toolkit_install.info": INSTALL_INFO,
            "/opt/cann/x86_64-linux/ascend_cann_install.info": 'version="8.5.0"\n',
        },
    )
    assert read_ascend(sources(tmp_path, {"ASCEND_HOME_PATH": "/opt/cann"})).runtime == "8.5.0"


def test_no_toolkit_is_a_note(tmp_path: Path) -> None:
    found = read_ascend(sources(machine(tmp_path)))
    assert found.runtime is None
    assert "ASCEND_HOME_PATH" in found.notes[0]


@pytest.mark.parametrize(("visible", "count"), [("1,2", 2), ("", 0), ("0,1,2,3", 4), ("0,9,1", 1)])
def test_visibility(tmp_path: Path, visible: str, count: int) -> None:
    found = read_ascend(sources(machine(tmp_path), {"ASCEND_RT_VISIBLE_DEVICES": visible}))
    assert len(found.devices) == count
    assert found.filtered_by == (("ASCEND_RT_VISIBLE_DEVICES",) if count < 4 else ())


def test_an_unknown_chip_is_named_unknown(tmp_path: Path) -> None:
    found = read_ascend(sources(machine(tmp_path, "0xd999")))
    assert found.devices[0].arch == "unknown"
    assert any("architecture unknown" in note for note in found.notes)


def test_without_device_nodes_there_is_nothing(tmp_path: Path) -> None:
    assert read_ascend(sources(machine(tmp_path, count=0))) == Found("ascend")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("8.1.RC1", "8.1rc1"),
        ("8.5.0", "8.5.0"),
        ("8.2.RC1.alpha003", "8.2rc1"),
        ("7.0.0.5", "7.0.0.5"),
        ("x", None),
    ],
)
def test_versions_can_be_compared(text: str, version: str | None) -> None:
    assert plain_version(text) == version
