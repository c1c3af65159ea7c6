"""The kit's seam for stand-ins: modules come and go, decisions are made for the emulated chip."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from types import ModuleType

import pytest

from anyattn.core.spec import AttentionSpec
from anyattn.errors import UnknownNameError
from anyattn.testing.emulators import EMULATORS, current_host, emulating, emulator_of
from anyattn.testing.emulators.modules import module_tree
from anyattn.testing.selecting import facts_of, select_for


def test_stand_ins_come_and_go() -> None:
    before = {name: module for name, module in sys.modules.items() if name.startswith("flashinfer")}
    with emulating("flashinfer") as emulator:
        first = importlib.import_module("flashinfer")
        assert first.__file__ == "<emulated flashinfer>"
        assert find_spec("flashinfer") is not None
        assert current_host() == emulator.host == "cuda:sm90"
        with emulating("flashinfer", "cuda:sm100"):
            assert importlib.import_module("flashinfer") is not first
            assert current_host() == "cuda:sm100"
        assert importlib.import_module("flashinfer") is first
    assert {name: m for name, m in sys.modules.items() if name.startswith("flashinfer")} == before
    assert current_host() is None


def test_what_was_imported_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real, child = ModuleType("flashinfer"), ModuleType("flashinfer.real_child")
    monkeypatch.setitem(sys.modules, "flashinfer", real)
    monkeypatch.setitem(sys.modules, "flashinfer.real_child", child)
    with emulating("flashinfer"):
        assert "flashinfer.real_child" not in sys.modules
        assert sys.modules["flashinfer"] is not real
    assert sys.modules["flashinfer"] is real
    assert sys.modules["flashinfer.real_child"] is child


def test_modules_hang_in_their_parents() -> None:
    tree: Mapping[str, ModuleType] = module_tree({"a.b.c": {"x": 1}, "a": {"y": 2}})
    assert set(tree) == {"a", "a.b", "a.b.c"}
    assert tree["a"].b.c.x == 1
    assert tree["a"].y == 2


def test_unknown_emulators_are_named() -> None:
    with pytest.raises(UnknownNameError, match="flashinfer"):
        emulator_of("flashinfre")
    assert emulator_of("flashinfer", latent=True) is EMULATORS["flashinfer_mla"]


@pytest.mark.parametrize("name", EMULATORS)
def test_every_emulator_is_for_a_chip_that_can_be_simulated(name: str) -> None:
    assert EMULATORS[name].host.startswith(facts_of(None, EMULATORS[name].host).target)
    with emulating(name) as emulator:
        assert emulator.modules()


def test_a_decision_for_another_chip_keeps_tensors_here() -> None:
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64)
    decision = select_for([spec], device="cpu", host="cuda:sm90", dtype="bfloat16", backend="flashinfer")
    assert decision.host.target == "cuda:sm90"
    assert decision.request.device == "cpu"
    assert decision.decode.backend == "flashinfer"
