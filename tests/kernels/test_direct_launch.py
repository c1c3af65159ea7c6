"""Decode's direct launches, on stand-ins for compiled kernels: the same arguments as by Triton's own path."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the portable extra isn't installed")

from metadata_cases import FORMS, compiler, spec

from anyattn.core.batch import ForwardBatch
from anyattn.core.plan import TableForm
from anyattn.kernels.triton import attention, decode_launch, launch, metadata_launch
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


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    found = {"decode_kernel": Kernel(), "merge_ranges_kernel": Kernel(), "ranges_kernel": Kernel()}
    for name, kernel in found.items():
        monkeypatch.setattr(decode_launch, name, kernel)
    found["kv_write_kernel"] = Kernel()
    monkeypatch.setattr(attention, "kv_write_kernel", found["kv_write_kernel"])
    monkeypatch.setattr(decode_launch, "_fills", {})
    monkeypatch.setattr(launch, "_direct", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
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


def test_repeated_launches_have_the_same_arguments(kernels: dict[str, Kernel]) -> None:
    given = scene()
    for lse in (None, torch.zeros(3, 4)):
        for variant in (Variant(0.25), Variant(0.25, sinks=torch.zeros(4))):
            given |= {"lse": lse, "variant": variant, "cache": scene()["cache"]}
            decode_launch.decode(**given)
            decode_launch.decode(**given)
            for name in ("decode_kernel", "merge_ranges_kernel"):
                kernel = kernels[name]
                assert kernel.compiled.calls[-1] == as_run(*kernel.launches[-1])


def test_new_steps_and_inputs_need_no_compilation(kernels: dict[str, Kernel]) -> None:
    given = scene()
    decode_launch.decode(**given)
    first = kernels["decode_kernel"].launches[0]
    for _ in range(3):
        given |= {"step": step(), "q": given["q"].clone(), "out": given["out"].clone()}
        decode_launch.decode(**given)
    assert [len(k.launches) for k in kernels.values()] == [1, 1, 0, 0]
    run = kernels["decode_kernel"].compiled.calls[-1]
    assert run[9:11] == (given["q"].data_ptr(), given["out"].data_ptr())
    names = ("source", "req_rows", "kv_start", "kv_lens", "ranges")
    assert run[18:23] == tuple(getattr(given["step"], name).data_ptr() for name in names)
    assert run[26:] == as_run(*first)[26:], "the layer's part"


def test_other_strides_types_and_alignments_are_other_kernels(kernels: dict[str, Kernel]) -> None:
    given = scene()
    queries = (
        given["q"],
        torch.zeros(3, 4, 20, dtype=torch.float16)[..., :16],
        torch.zeros(3 * 64 + 1, dtype=torch.float16)[1:].view(3, 4, 16),
        given["q"].bfloat16(),
    )
    for count, q in enumerate(queries, 1):
        decode_launch.decode(**(given | {"q": q}))
        assert len(kernels["decode_kernel"].launches) == count


def test_a_listener_hears_every_launch(kernels: dict[str, Kernel]) -> None:
    given, heard = scene(), []
    decode_launch.decode(**given)
    previous = launch.set_hook(
        lambda kernel, grid, args, constexprs, options: bool(heard.append(kernel)) or True
    )
    try:
        decode_launch.decode(**given)
    finally:
        launch.set_hook(previous)
    assert heard == [kernels["decode_kernel"], kernels["merge_ranges_kernel"]]
    assert not kernels["decode_kernel"].compiled.calls


def test_writes_are_repeated_too(kernels: dict[str, Kernel]) -> None:
    cache, kernel = scene()["cache"], kernels["kv_write_kernel"]
    for tokens in (3, 5, 3):
        k, v = (torch.zeros(tokens, 2, 16, dtype=torch.float16) for _ in range(2))
        loc = torch.arange(tokens)
        attention.kv_write(k, v, cache, loc)
    assert len(kernel.launches) == 1
    (_, first, options), run = kernel.launches[0], kernel.compiled.calls[-1]
    assert run == as_run((3,), (k, v, loc, *first[3:]), options)
    odd = torch.zeros(3 * 32 + 1, dtype=torch.float16)[1:].view(3, 2, 16)
    attention.kv_write(odd, odd, cache, torch.arange(3))
    assert len(kernel.launches) == 2


def test_ranges_are_filled_alike(kernels: dict[str, Kernel]) -> None:
    kernel, steps = kernels["ranges_kernel"], [step() for _ in range(3)]
    for each in steps:
        decode_launch.fill_ranges(each)
    assert len(kernel.launches) == 1
    (grid, args, options), run, last = kernel.launches[0], kernel.compiled.calls[-1], steps[-1]
    tensors = (last.req_rows, last.kv_start, last.kv_lens, last.ranges)
    assert run == as_run(grid, (*tensors, *args[4:]), options)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.kind.value}-{form.kernel_page}")
def test_tables_are_filled_alike(
    form: TableForm, kernels: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every later step runs the first one's kernel, with its own tensors and numbers."""
    kernel = Kernel()
    monkeypatch.setattr(metadata_launch, "metadata_kernel", kernel)
    made = compiler(form, [spec(), spec(window=9)])
    made.filler, heard = metadata_launch.FusedFiller(made.table), []
    for lens in ([3, 20], [7, 1, 40], [5, 5]):
        plan = made.prepare(ForwardBatch.decode(range(len(lens)), lens, [16 + n for n in range(len(lens))]))
        made.filler(plan)
        with launch_hook(heard):
            made.filler(plan)
        (grid, args, options) = heard[-1]
        if len(kernel.compiled.calls):
            run = kernel.compiled.calls[-1]
            want = as_run((*grid, 1)[:2], args, options)
            assert run == (*want[:2], *want[3:])
    assert len(kernel.launches) == 1
    assert len(kernel.compiled.calls) == 2


@contextmanager
def launch_hook(heard: list[Any]) -> Iterator[None]:
    def hear(kernel: Any, grid: Any, args: Any, constexprs: Any, options: Any) -> bool:
        heard.append((grid, args, {**constexprs, **options}))
        return True

    before = launch.set_hook(hear)
    try:
        yield
    finally:
        launch.set_hook(before)
