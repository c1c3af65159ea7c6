"""Which kernel an extend gets, on tensors without storage; and how the one for Hopper is scheduled."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the portable extra isn't installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels can't be compiled", allow_module_level=True)

from triton import knobs

from anyattn.kernels.triton.aot import TARGETS, Launch, compile_launch
from anyattn.kernels.triton.attention import Cache, Heads, Variant
from anyattn.kernels.triton.configs.choose import Extend, num_units
from anyattn.kernels.triton.extend_launch import GLUON_VERSIONS, ExtendStep, extend
from anyattn.kernels.triton.launch import set_hook

TILES = Extend(64, 64, 4, 3, tma=Extend(128, 64, 8, 2, 128), hopper=Extend(128, 128, 4, 2))
TOKENS, REQUESTS = 4096, 8


def _meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _halves(*shape: int) -> torch.Tensor:
    return _meta(*shape, dtype=torch.bfloat16)


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    seen: list[Launch] = []

    def hook(kernel: Any, grid: Any, args: Any, constexprs: Any, options: Any) -> bool:
        seen.append(Launch(kernel, tuple(args), {**constexprs, "grid": grid}, options))
        return True

    previous = set_hook(hook)
    yield seen
    set_hook(previous)


def run(
    *, page: int = 16, fresh: bool = False, heads: Heads | None = None, kv: torch.dtype = torch.bfloat16,
    layout: str = "NHD", variant: Variant | None = None, tiles: Extend = TILES, anchor: bool = False,
    change: Callable[[ExtendStep], ExtendStep] = lambda step: step, q: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """An extend of 8 requests; `fresh`: from k and v alone."""
    heads = heads or Heads(32, 8, 128, 128)
    rows = (page, heads.num_kv) if layout == "NHD" else (heads.num_kv, page)
    k, v = (_meta(4096, *rows, dim, dtype=kv) for dim in (heads.dim, heads.v_dim))
    one = _meta(1, dtype=torch.float32)
    step = ExtendStep(
        source=_meta(9, 32768),
        req_rows=_meta(REQUESTS, dtype=torch.int64),
        query_offsets=_meta(REQUESTS + 1),
        prefix_lens=_meta(REQUESTS),
        pool_lens=None if fresh else _meta(REQUESTS),
        kv_start=_meta(REQUESTS),
    )
    new = (_halves(TOKENS, heads.num_kv, heads.dim), _halves(TOKENS, heads.num_kv, heads.v_dim))
    extend(
        _halves(TOKENS, heads.num_q, heads.dim) if q is None else q, *(new if fresh else (None, None)),
        Cache.of(k, v, layout, one, one, False, None, page), change(step), heads, variant or Variant(0.1),
        tiles, _halves(TOKENS, heads.num_q, heads.v_dim), None, anchor=anchor,
    )  # fmt: skip


gluon = pytest.mark.skipif(
    not __import__("triton").__version__.startswith(GLUON_VERSIONS), reason="another Gluon"
)


@gluon
@pytest.mark.parametrize("page", [16, 48, 64, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_from_16_on_are_scheduled_by_hand(page: int, layout: str, launches: list[Launch]) -> None:
    run(page=page, layout=layout)
    (launch,) = launches
    assert launch.kernel.__name__ == "extend_hopper_kernel"
    assert launch.constexprs["BOX"] == {16: 16, 48: 16, 64: 64, 256: 128}[page]
    assert launch.constexprs["grid"] == (num_units(torch.device("meta")),)


@gluon
def test_new_keys_are_read_in_whole_tiles(launches: list[Launch]) -> None:
    run(fresh=True, page=1)
    assert launches[0].kernel.__name__ == "extend_hopper_kernel"
    assert (launches[0].constexprs["BOX"], launches[0].constexprs["PAGED"]) == (128, False)


@gluon
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("heads", "tiles"),
    [
        (Heads(28, 4, 128, 128), TILES),
        (Heads(24, 8, 64, 64), TILES),
        (Heads(16, 2, 256, 256), replace(TILES, hopper=Extend(128, 64, 4, 2))),
    ],
    ids=["group of 7", "group of 3", "wide"],
)
def test_by_hand_go_other_groups_and_wide_heads(
    fresh: bool, heads: Heads, tiles: Extend, launches: list[Launch]
) -> None:
    """As many tokens in a warpgroup as have all their rows there."""
    run(fresh=fresh, heads=heads, tiles=tiles, variant=Variant(0.1, window=1024))
    (launch,) = launches
    assert launch.kernel.__name__ == "extend_hopper_kernel"
    assert launch.constexprs["HAS_WINDOW"]
    assert launch.constexprs["SETS"] == (1 if heads.dim == 256 else 2)
    assert isinstance(launch.args[0], torch.Tensor) == (64 % heads.group != 0)


@pytest.mark.parametrize(
    "asked",
    [
        {"heads": Heads(32, 8, 64, 128)},
        {"heads": Heads(32, 8, 32, 32)},
        {"heads": Heads(33, 1, 128, 128)},
        {"heads": Heads(128, 1, 128, 128)},
        {"tiles": replace(TILES, hopper=None)},
        {"q": _halves(TOKENS, 32, 132)[:, :, :128]},
    ],
    ids=["unequal", "narrow", "group of 33", "group of 128", "no tiles", "strides of q"],
)
def test_what_triton_schedules(asked: dict[str, Any], launches: list[Launch]) -> None:
    run(page=64, **asked)
    assert [launch.kernel.__name__ for launch in launches] == ["extend_tma_kernel"]


@pytest.mark.parametrize(
    "asked",
    [
        {"page": 8},
        {"page": 16, "heads": Heads(33, 1, 128, 128)},  # tiles of 64 on pages of 16
        {"kv": torch.float8_e4m3fn},
        {"heads": Heads(32, 8, 80, 80)},
        {"variant": Variant(0.1, causal=False)},
        {"anchor": True},
        {"tiles": replace(TILES, hopper=None, tma=None)},
        {"change": lambda step: replace(step, mask_cells=_meta(64), mask_indptr=_meta(9))},
        {
            "variant": Variant(0.1, window=1024),
            "change": lambda step: replace(step, positions=_meta(TOKENS, dtype=torch.int64)),
        },
    ],
    ids=[
        "short",
        "group of 33",
        "fp8",
        "odd",
        "both ways",
        "anchor",
        "no tiles",
        "mask",
        "positions in a window",
    ],
)
def test_what_needs_pointers(asked: dict[str, Any], launches: list[Launch]) -> None:
    run(**{"page": 64, **asked})
    assert [launch.kernel.__name__ for launch in launches] == ["extend_kernel"]


def _loops(cubin: bytes, folder: Path) -> list[list[str]]:
    """Bodies of the loops in a binary, as instructions."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [knobs.nvidia.nvdisasm.path, "-c", str(file)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*(\.L_x_\d+):", line))}
    ends = [(i, m[1]) for i, line in enumerate(lines) if (m := re.search(r"BRA.*`\((\.L_x_\d+)\)", line))]
    return [lines[labels[name] : i + 1] for i, name in ends if labels.get(name, i) < i]


@gluon
@pytest.mark.parametrize(
    ("page", "heads", "products", "exponentials"),
    [
        (0, Heads(32, 8, 128, 128), 16, 64),
        (16, Heads(32, 8, 128, 128), 16, 64),
        (16, Heads(28, 4, 128, 128), 16, 64),
        (0, Heads(16, 2, 256, 256), 20, 32),
    ],
    ids=["k and v", "page of 16", "group of 7", "wide"],
)
def test_the_softmax_runs_beside_a_product(
    page: int, heads: Heads, products: int, exponentials: int, launches: list[Launch], tmp_path: Path
) -> None:
    """In the loops over whole tiles: all exponentials of a thread between the wait for the scores and the
    wait for the values, and no wait between two instructions of a product. The assembler decides both.
    """
    block_n = 2 * exponentials
    run(fresh=not page, page=page or 16, heads=heads, tiles=replace(TILES, hopper=Extend(128, block_n, 4, 2)))
    (launch,) = launches
    constexprs = {name: value for name, value in launch.constexprs.items() if name != "grid"}
    compiled = compile_launch(replace(launch, constexprs=constexprs), TARGETS["sm_90"])
    inner = [
        body
        for body in _loops(compiled.asm["cubin"], tmp_path)
        if len(body) < 600 and sum("HGMMA" in line for line in body) == products
    ]
    whole = sorted(inner, key=len)[:2]
    assert len(whole) == 2, "one of each warpgroup"
    for body in whole:
        waits = [i for i, line in enumerate(body) if "WARPGROUP.DEPBAR" in line]
        assert ["gsb0, 0x1" in body[i] for i in waits] == [True, False]
        between = body[waits[0] : waits[1]]
        assert sum("MUFU.EX2" in line for line in between) >= exponentials
        assert sum("LDL" in line or "STL" in line for line in body) <= 4
