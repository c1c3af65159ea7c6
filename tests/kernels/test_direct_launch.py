"""Decode's direct launches, on stand-ins for compiled kernels: the same arguments as by Triton's own path."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the portable extra isn't installed")

from direct_cases import Kernel, as_run, scene, stand_ins, step
from metadata_cases import FORMS, compiler, spec

from anyattn.core.batch import ForwardBatch
from anyattn.core.plan import TableForm, TableKind
from anyattn.kernels.triton import attention, decode_launch, launch, metadata_launch
from anyattn.kernels.triton.attention import Variant


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    return stand_ins(monkeypatch)


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
    for _ in range(2):  # a plan remembers its launch, for the table that it reads
        made.filler(plan)
        assert kernel.compiled.calls[-1] == run
        assert plan.refill.run == kernel.compiled.run
    flat, known = form.kind in (TableKind.TOKEN_CSR, TableKind.PAGE_CSR), plan.refill
    plan.max_kv_len *= 3
    made.filler(plan)
    assert (plan.refill is known) != flat, "the grid of flat lists is for requests that are about as long"
    made.table.req_to_token = made.table.req_to_token.clone()
    for _ in range(2):
        made.filler(plan)
        assert made.table.req_to_token.data_ptr() in kernel.compiled.calls[-1]


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
