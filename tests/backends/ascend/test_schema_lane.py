"""The lane that reads a torch-npu wheel: what it makes of a library's bytes and of a handler's source."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from npu_stand import RECORDED, SCHEMAS, bind

PATH = Path(__file__).resolve().parents[3] / "ci" / "lanes" / "ascend_schema.py"


@pytest.fixture(scope="module")
def lane() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ascend_schema", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_schemas_are_found_among_strings(lane: ModuleType) -> None:
    good = "npu_work.out(Tensor a, SymInt[]? lens=None, *, Tensor(a!) out) -> Tensor(a!)"
    library = (
        b"\x7fELF\x00"
        + good.encode()
        + b"\x00npu_work(Tensor a, std::string b=1) -> Tensor\x00plain text\x00"
    )
    assert lane.schemas_of(library) == {"npu_work.out": good}


def test_types_are_read_from_mangled_names(lane: ModuleType) -> None:
    library = b"\x00_ZN3atb20_npu_paged_attentionERKN2at6TensorES3_S3_lldS3_S3_RS1_RKSt8optionalIS1_E\x00"
    assert lane.cpp_types(library, "_npu_paged_attention") == RECORDED["cpp_types"]["_npu_paged_attention"]
    with pytest.raises(AssertionError, match="isn't in the library"):
        lane.cpp_types(library, "_npu_gone")


def test_what_graphs_update_is_read_from_the_handler(lane: ModuleType) -> None:
    source = 'class A:\n    UPDATE_SPECS = {"work": [("arg", 5, "lens")], "work.out": [("arg", 5, "lens")]}\n'
    assert lane.updatable(source) == {"work": ["lens"]}


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_wrong_calls_are_refused_by_schema(name: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        bind(SCHEMAS[name], (), {"no_such_argument": 1})
    with pytest.raises(TypeError, match=r"is wanted|is missing"):
        bind(SCHEMAS[name], (1,), {})
