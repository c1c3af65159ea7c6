"""Stand-ins for compiled kernels, and a decode step to launch: what direct launches are compared with."""

from typing import Any

import pytest
import torch

from anyattn.kernels.triton import attention, decode_launch, launch
from anyattn.kernels.triton.attention import Cache, Heads, Variant
from anyattn.kernels.triton.configs import Decode

HEADS = Heads(4, 2, 16, 16)
TILES = Decode(16, 4, 2, 6, overlap=1)
STREAM = 77


class Compiled:
    """Notes what it is run with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.calls.append(args)


class Kernel:
    """`kernel[grid](*args, **options)` as Triton's JIT: notes it, returns what was compiled."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
        self.compiled = Compiled()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*args: Any, **options: Any) -> Compiled:
            self.launches.append((grid, args, options))
            return self.compiled

        return start


def stand_ins(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    """Every kernel of a decode step, launched directly on device 0."""
    found = {"decode_kernel": Kernel(), "merge_ranges_kernel": Kernel(), "ranges_kernel": Kernel()}
    for name, kernel in found.items():
        monkeypatch.setattr(decode_launch, name, kernel)
    found["kv_write_kernel"] = Kernel()
    monkeypatch.setattr(attention, "kv_write_kernel", found["kv_write_kernel"])
    monkeypatch.setattr(decode_launch, "_fills", {})
    monkeypatch.setattr(launch, "_direct", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    return found


def scene(dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    k, v = (torch.zeros(8, 16, 2, 16, dtype=dtype) for _ in range(2))
    one = torch.ones(1)
    return {
        "q": torch.zeros(3, 4, 16, dtype=dtype),
        "cache": Cache.of(k, v, "NHD", one, one, False),
        "step": step(),
        "heads": HEADS,
        "variant": Variant(0.25),
        "out": torch.zeros(3, 4, 16, dtype=dtype),
        "lse": None,
    }


def step() -> decode_launch.DecodeStep:
    lens = torch.zeros(3, dtype=torch.int32)
    table = torch.zeros(4, 128, dtype=torch.int32)
    return decode_launch.DecodeStep.of(table, torch.arange(3), lens, lens, None, 16, HEADS, TILES)


def as_run(grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """What the compiled kernel is to be run with."""
    values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
    constants = [v for n, v in options.items() if n not in ("num_warps", "num_stages", "launch_pdl")]
    return (*grid, 1, 1, STREAM, "function", "metadata", None, None, None, *values, *constants)
