"""Names, aliases, contract versions and lazy loading of backend records."""

from __future__ import annotations

import sys

import pytest
from select_fakes import record

from anyattn.core.registry import Registry, load_target
from anyattn.errors import BackendBuildError, ConfigError, UnknownNameError


def test_names_keep_the_order_of_registration() -> None:
    registry = Registry((record("b"), record("a")))
    registry.register(record("c"))
    assert registry.names() == ("b", "a", "c")
    assert [r.name for r in registry.records()] == ["b", "a", "c"]


def test_a_deprecated_alias_resolves_and_warns() -> None:
    registry = Registry((record("dsa", deprecated_aliases=("nsa",)),))
    with pytest.warns(DeprecationWarning, match="'nsa' is deprecated, use 'dsa'"):
        assert registry.get("nsa").name == "dsa"
    assert registry.names() == ("dsa",)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'flashinfer'"):
        Registry((record("flashinfer"), record("triton"))).get("flashinfr")


@pytest.mark.parametrize("clash", [record("a"), record("b", deprecated_aliases=("a",))])
def test_a_taken_name_is_refused(clash: object) -> None:
    registry = Registry((record("a", deprecated_aliases=("old",)),))
    with pytest.raises(ConfigError, match="taken"):
        registry.register(clash)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="taken"):
        registry.register(record("old"))


def test_another_contract_version_is_refused_before_any_import() -> None:
    with pytest.raises(ConfigError, match="another contract"):
        Registry((record("plugin", contract=99, origin="somebody"),))


def test_load_target_imports_lazily() -> None:
    sys.modules.pop("colorsys", None)
    assert load_target("fractions:Fraction").__name__ == "Fraction"
    assert "colorsys" not in sys.modules


@pytest.mark.parametrize(
    "target", ["no_such_module_here:X", "fractions:Nothing", "fractions:gcd_", "math:pi"]
)
def test_load_target_says_what_is_wrong(target: str) -> None:
    with pytest.raises(BackendBuildError, match=target.split(":")[0]):
        load_target(target)
