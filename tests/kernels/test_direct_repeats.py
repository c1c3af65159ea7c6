"""A layer's decode call repeated at once: the launches of the ordinary path, or none at all."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the portable extra isn't installed")

from dataclasses import replace

from direct_cases import HEADS, TILES, Kernel, as_run, scene, stand_ins

from anyattn.backends.portable.triton_repeats import DecodeRepeats
from anyattn.kernels.triton import attention, launch
from anyattn.kernels.triton.attention import Heads, Variant
from anyattn.kernels.triton.decode_launch import DecodeStep, decode

NAMES = ("kv_write_kernel", "decode_kernel", "merge_ranges_kernel")
HALF = torch.float16
PLAIN = Variant(0.25)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    return stand_ins(monkeypatch)


def zeros(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


class Layer:
    """One layer of a step, called at once and by the ordinary path."""

    def __init__(
        self, variant: Variant = PLAIN, store: Any = None, heads: Heads = HEADS, **tiles: Any
    ) -> None:
        self.cache, self.variant, self.heads = scene()["cache"], variant, heads
        self.tiles = replace(TILES, **tiles)
        self.step = self.new_step()
        self.repeats = DecodeRepeats(self.cache, heads, variant, "group", HALF, store)  # type: ignore[arg-type]

    def new_step(self, heads: Heads = HEADS) -> DecodeStep:
        lens, table = torch.zeros(3, dtype=torch.int32), torch.zeros(4, 128, dtype=torch.int32)
        return DecodeStep.of(table, torch.arange(3), lens, lens, None, 16, heads, self.tiles)

    def inputs(self) -> dict[str, torch.Tensor]:
        return {"q": zeros(3, 4, 16), "k": zeros(3, 2, 16), "v": zeros(3, 2, 16), "out": zeros(3, 4, 16)}

    def ordinary(self, loc: torch.Tensor, q: Any, k: Any, v: Any, out: Any) -> None:
        attention.kv_write(k, v, self.cache, loc)
        decode(q, self.cache, self.step, self.heads, self.variant, out, None)

    def at_once(self, loc: torch.Tensor, q: Any, k: Any, v: Any, out: Any) -> torch.Tensor | None:
        key = SimpleNamespace(num_tokens=loc.shape[0])
        plan = SimpleNamespace(private=SimpleNamespace(decode={"group": self.step}), key=key)
        return self.repeats(q, k, v, out, loc, plan)  # type: ignore[arg-type]


def runs(kernels: dict[str, Kernel]) -> list[int]:
    return [len(kernels[name].compiled.calls) for name in NAMES]


VARIANTS = (PLAIN, Variant(0.5, cap=3.0, sinks=torch.zeros(4, dtype=torch.bfloat16)))


@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "cap-sinks"])
@pytest.mark.parametrize("split", [True, False])
def test_the_launches_of_the_ordinary_path(kernels: dict[str, Kernel], variant: Variant, split: bool) -> None:
    layer, loc = Layer(variant, split=split), torch.arange(3)
    layer.ordinary(loc, **layer.inputs())
    first = {name: kernels[name].launches[0] for name in NAMES[: 2 + split]}
    layer.step = layer.new_step()
    given, loc = layer.inputs(), torch.arange(3)
    assert layer.at_once(loc, **given) is given["out"]
    layer.ordinary(loc, **given)
    for name, (grid, args, options) in first.items():
        once, again = kernels[name].compiled.calls
        assert once == again
        assert once != as_run(grid, args, options), "new addresses"
        assert len(kernels[name].launches) == 1
    assert bool(kernels["merge_ranges_kernel"].launches) == split


def test_an_output_of_its_own(kernels: dict[str, Kernel]) -> None:
    layer, loc = Layer(), torch.arange(3)
    layer.ordinary(loc, **layer.inputs())
    made = layer.at_once(loc, **(layer.inputs() | {"out": None}))
    assert made is not None
    assert (made.shape, made.dtype, made.stride()) == ((3, 4, 16), HALF, (64, 16, 1))
    assert kernels["decode_kernel"].compiled.calls[-1][10] == made.data_ptr()
    slices = zeros(3, 8, 16)[:, :4]
    layer.ordinary(loc, **(layer.inputs() | {"q": slices}))
    made = layer.at_once(loc, **(layer.inputs() | {"q": slices, "out": None}))
    assert made is not None
    assert made.stride() == (64, 16, 1)
    turned = zeros(4, 3, 16).transpose(0, 1)
    layer.ordinary(loc, **(layer.inputs() | {"q": turned}))
    made = layer.at_once(loc, **(layer.inputs() | {"q": turned, "out": None}))
    assert made is not None
    assert made.stride() == (64, 16, 1), "not those of q"


def test_keys_stored_by_somebody_else(kernels: dict[str, Kernel]) -> None:
    stored: list[Any] = []
    layer, loc = Layer(store=lambda *given: stored.append(given)), torch.arange(3)
    given = layer.inputs()
    layer.ordinary(loc, **given)
    before = runs(kernels)
    assert layer.at_once(loc, **given) is given["out"]
    assert stored == [(loc, given["k"], given["v"])]
    assert runs(kernels) == [before[0], before[1] + 1, before[2] + 1]


ODD = zeros(3 * 64 + 1)[1:].view(3, 4, 16)
DOUBLE = zeros(3, 4, 32)[..., ::2]
OTHERS: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "more tokens": lambda g: {"q": zeros(4, 4, 16)},
    "keys of fewer tokens": lambda g: {"k": zeros(2, 2, 16)},
    "flat": lambda g: {"q": g["q"].view(3, 64)},
    "values of other heads": lambda g: {"v": zeros(3, 4, 8).view(3, 4, 8)},
    "another type": lambda g: {"q": g["q"].bfloat16()},
    "keys of another type": lambda g: {"k": g["k"].float()},
    "another type of output": lambda g: {"out": g["out"].float()},
    "an output of more rows": lambda g: {"out": zeros(4, 4, 16)},
    "an odd address": lambda g: {"q": ODD},
    "an odd address of the output": lambda g: {"out": ODD},
    "heads that aren't dense": lambda g: {"q": DOUBLE},
    "an output that isn't dense": lambda g: {"out": DOUBLE},
}


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_done_for_other_tensors(kernels: dict[str, Kernel], name: str) -> None:
    layer, loc = Layer(), torch.arange(3)
    for _ in range(2):
        layer.ordinary(loc, **layer.inputs())
    assert layer.at_once(loc, **layer.inputs()) is not None
    before = runs(kernels)
    given = layer.inputs()
    assert layer.at_once(loc, **(given | OTHERS[name](given))) is None
    assert runs(kernels) == before


def test_nothing_is_done_for_what_was_not_launched_yet(kernels: dict[str, Kernel]) -> None:
    layer, loc = Layer(), torch.arange(3)
    assert layer.at_once(loc, **layer.inputs()) is None
    layer.ordinary(loc, **layer.inputs())
    assert layer.at_once(loc, **layer.inputs()) is not None
    layer.tiles = replace(TILES, block_n=32)
    layer.step = layer.new_step()
    assert layer.at_once(loc, **layer.inputs()) is None, "other tiles"
    layer.ordinary(loc, **layer.inputs())
    assert layer.at_once(loc, **layer.inputs()) is not None
    layer.step = layer.new_step(Heads(8, 2, 16, 16))
    assert layer.at_once(loc, **layer.inputs()) is None, "a workspace for other heads"


def test_listeners_and_other_devices(kernels: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, loc = Layer(), torch.arange(3)
    layer.ordinary(loc, **layer.inputs())
    assert layer.at_once(loc, **layer.inputs()) is not None
    before = runs(kernels)
    previous = launch.set_hook(lambda *_: True)
    assert layer.at_once(loc, **layer.inputs()) is None
    launch.set_hook(previous)
    monkeypatch.setattr(launch, "_current_device", lambda: 1)
    assert layer.at_once(loc, **layer.inputs()) is None
    assert runs(kernels) == before


def launcher(**sizes: int) -> Any:
    """As Triton 3.6's launcher for CUDA."""

    class CudaLauncher:
        launch_cooperative_grid, launch_pdl = False, True
        global_scratch_size, profile_scratch_size = sizes.get("scratch", 0), sizes.get("profile", 0)

        def __init__(self) -> None:
            self.seen: list[tuple[Any, ...]] = []

        def launch(self, *args: Any) -> None:
            self.seen.append(args)

        def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
            options = (self.launch_cooperative_grid, self.launch_pdl)
            scratch = [7 if size else None for size in (self.global_scratch_size, self.profile_scratch_size)]
            self.launch(x, y, z, stream, function, *options, *scratch, *args)

    CudaLauncher.__module__ = "triton.backends.nvidia.driver"
    return CudaLauncher()


@pytest.mark.parametrize("sizes", [{}, {"scratch": 16}, {"profile": 16}])
def test_the_c_half_of_a_launcher_is_called_alike(sizes: dict[str, int]) -> None:
    """Its Python half makes scratch memory, and is taken where there is some."""
    run = launcher(**sizes)
    compiled: Any = SimpleNamespace(run=run, function=11, packed_metadata=(4, 1, 0))
    run(5, 1, 1, 9, 11, (4, 1, 0), None, None, None, 1, 2, 3)
    started = launch.Started(compiled, (2, 3))
    started.start(9, 5, 1)
    assert run.seen[0] == run.seen[1]
    assert (started.run == run.launch) == (not sizes)


def test_another_launcher_is_called_whole() -> None:
    seen: list[tuple[Any, ...]] = []
    compiled: Any = SimpleNamespace(run=lambda *args: seen.append(args), function=11, packed_metadata=(4,))
    launch.Started(compiled, (3,)).start_rows(9, 5, 2, 1)
    assert seen == [(5, 2, 1, 9, 11, (4,), None, None, None, 1, 3)]
