"""Call sites of `ascend` against torch-npu's own schemas and meta functions, on a machine without CANN.

    pip download --no-deps torch-npu==2.13.0
    python ci/lanes/ascend_schema.py torch_npu-2.13.0-*.whl            says what differs, exit status 1 then
    python ci/lanes/ascend_schema.py torch_npu-2.13.0-*.whl --write    records the schemas

The wheel is read, not installed: merely installed without CANN it breaks `import torch`. Run it in an
environment whose torch is the one that the wheel asks for. Operator schemas are strings in the wheel's
compiled library; they are defined for torch's dispatcher, torch-npu's `_meta_registrations.py` gives them
their shapes, and every step of `tests/backends/ascend/npu_steps.py` is then run with each operator called on
meta tensors.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "backends" / "ascend"
FILE = TESTS / "torch_npu_schemas.json"
CALLED = ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2", "npu_format_cast")
"""Operators with a schema in the library; those of ATB are registered by C++ type and keep no names."""
DESCRIBED = ("_npu_paged_attention", "_npu_paged_attention_splitfuse")
_TEXT = re.compile(rb"(?<=\x00)\w+(?:\.\w+)?\([\x20-\x7e]*\) -> [\x20-\x7e]+(?=\x00)")
_TYPES = (
    ("RKSt8optionalIS1_E", "Tensor?"),
    ("RKN2at6TensorE", "Tensor"),
    ("RS1_", "Tensor"),
    ("S3_", "Tensor"),
    ("l", "int"),
    ("d", "float"),
)


def schemas_of(library: bytes) -> dict[str, str]:
    """Operator schemas among the strings of a compiled library, by name with overload."""
    found = {}
    for match in _TEXT.findall(library):
        text = match.decode()
        try:
            torch._C.parse_schema(text)
        except RuntimeError:
            continue  # C++ spellings of the same signatures
        found[text.partition("(")[0]] = text
    return found


def cpp_types(library: bytes, name: str) -> list[str]:
    """Argument types of an ATB operator, from its mangled C++ name."""
    parts = "|".join(mangled for mangled, _ in _TYPES)
    symbol = re.search(rf"_ZN3atb{len(name)}{name}E((?:{parts})+)\x00".encode(), library)
    assert symbol is not None, f"{name} isn't in the library"
    return [dict(_TYPES)[mangled] for mangled in re.findall(parts, symbol.group(1).decode())]


def updatable(handler: str) -> dict[str, list[str]]:
    """Arguments that `NPUGraph.update` rewrites, by operator: `UPDATE_SPECS` of a handler's source."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(handler)):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "UPDATE_SPECS":
            specs = ast.literal_eval(node.value)
            found |= {
                name: [entry[2] for entry in entries] for name, entries in specs.items() if "." not in name
            }
    return found


def define(schemas: Mapping[str, str]) -> tuple[torch.library.Library, int]:
    """Make the dispatcher know the operators. The library object keeps them alive; and how many it took."""
    library, taken = torch.library.Library("npu", "DEF"), 0  # type: ignore[no-untyped-call]
    for text in schemas.values():
        try:
            library.define(text)  # type: ignore[no-untyped-call]
            taken += 1
        except RuntimeError:
            continue  # a type that only torch-npu's own build knows
    return library, taken


def load_meta(folder: Path) -> None:
    """Run torch-npu's meta registrations on stubs of what they import from CANN's side."""
    stubs = {name: ModuleType(name) for name in ("torch_npu", "torch_npu.npu", "torch_npu.utils")}
    # Numbers of torch-npu's own dtypes: None of them is passed here.
    stubs["torch_npu"].__getattr__ = lambda name: -1  # type: ignore[method-assign]
    stubs["torch_npu.utils._error_code"] = ModuleType("torch_npu.utils._error_code")
    stubs["torch_npu.utils._error_code"].ErrCode = SimpleNamespace(VALUE=0, PARAM=0, TYPE=0, NOT_SUPPORT=0)  # type: ignore[attr-defined]
    stubs["torch_npu.utils._error_code"].ops_error = str  # type: ignore[attr-defined]
    stubs["torch_npu.npu.utils"] = ModuleType("torch_npu.npu.utils")
    stubs["torch_npu.npu.utils"].get_cann_version = lambda *_: "9.0.0"  # type: ignore[attr-defined]
    stubs["torch_npu.npu._backends"] = ModuleType("torch_npu.npu._backends")
    stubs["torch_npu.npu._backends"].get_soc_version = lambda: 220  # type: ignore[attr-defined]
    sys.modules.update(stubs)
    _load("meta_registrations", folder / "torch_npu/op_plugin/meta/_meta_registrations.py")
    for name in stubs:
        del sys.modules[name]


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def real_shapes(name: str, bound: Mapping[str, Any]) -> tuple[torch.Size, torch.Size]:
    """Shapes of a fused call's results, by the dispatcher and torch-npu's meta function."""
    given = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in bound.items()}
    out, sums = getattr(torch.ops.npu, name)(
        given.pop("query"), given.pop("key"), given.pop("value"), **given
    )
    assert out.dtype == bound["query"].dtype
    return out.shape, sums.shape


def read(wheel: Path, folder: Path) -> dict[str, Any]:
    """Unpack what is needed; the record of this wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        wanted = ("libtorch_npu.so", "libop_plugin_atb.so", "_meta_registrations.py", "ifa_handler.py")
        for name in names:
            if name.endswith(wanted):
                archive.extract(name, folder)
        about = next(archive.read(n).decode() for n in names if n.endswith(".dist-info/METADATA"))
    version = re.search(r"^Version: (\S+)", about, re.MULTILINE)
    assert version is not None
    library = (folder / "torch_npu/lib/libtorch_npu.so").read_bytes()
    atb = (folder / "torch_npu/lib/libop_plugin_atb.so").read_bytes()
    schemas = schemas_of(library)
    handler = (folder / "torch_npu/npu/_npugraph_handlers/ifa_handler.py").read_text()
    return {
        "distribution": "torch-npu",
        "version": version.group(1),
        "schemas": {name: schemas[name] for name in CALLED},
        "cpp_types": {name: cpp_types(atb, name) for name in DESCRIBED},
        "updatable": updatable(handler),
        "all": schemas,
    }


def run_steps() -> int:
    """Every step of the tests with its operators on meta tensors; how many operator calls that were."""
    sys.path.insert(0, str(TESTS))
    from npu_stand import standing
    from npu_steps import steps

    count = 0
    for step in steps():
        with standing(real_shapes) as calls:
            step()
            count += len(calls.seen)
    return count


def main() -> int:
    """Exit status 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = read(args.wheel, Path(name))
        every = found.pop("all")
        old = json.loads(FILE.read_text()) if FILE.exists() else {}
        differing = [key for key in found if old.get(key) != found[key]]
        if args.write:
            FILE.write_text(json.dumps(old | found, indent=1, sort_keys=True) + "\n")
        kept, taken = define(every)
        load_meta(Path(name))
        calls = run_steps()
        del kept
    print(f"torch-npu {found['version']} on torch {torch.__version__}: {len(every)} schemas, {taken} defined")
    print(f"{calls} operator calls accepted; recorded fields that differ: {', '.join(differing) or 'none'}")
    return 1 if differing and not args.write else 0


if __name__ == "__main__":
    sys.exit(main())
