"""Extend launched again, on stand-ins for compiled kernels: the same arguments as by Triton's own path."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the portable extra isn't installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is launched directly there", allow_module_level=True)

from direct_cases import STREAM, Kernel

from anyattn.kernels.triton import extend_launch, extend_repeats, launch
from anyattn.kernels.triton.attention import Cache, Heads, Variant
from anyattn.kernels.triton.configs.choose import Extend
from anyattn.kernels.triton.extend_launch import ExtendStep, extend
from anyattn.kernels.triton.launch import is_descriptor

HEADS = Heads(4, 2, 64, 64)
POINTERS = Extend(16, 16, 4, 1)
DESCRIPTORS = replace(POINTERS, tma=Extend(16, 16, 4, 1))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Any of extend's."""
    found = Kernel()
    monkeypatch.setattr(extend_launch, "extend_kernel", found)
    monkeypatch.setattr(extend_launch, "extend_tma_kernel", found)  # which of them is seen in arguments
    monkeypatch.setattr(launch, "_direct", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    return found


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def scene(config: Extend = POINTERS, *, new: bool = False, **changes: Any) -> dict[str, Any]:
    one = torch.ones(1)
    given: dict[str, Any] = {
        "cache": Cache.of(halves(8, 16, 2, 64), halves(8, 16, 2, 64), "NHD", one, one, False, None, 16),
        "config": config, "heads": HEADS, "variant": Variant(0.25), "lse": None,
    }  # fmt: skip
    return given | fresh_inputs(new=new) | changes


def fresh_inputs(tokens: int = 12, requests: int = 3, *, new: bool = False) -> dict[str, Any]:
    """What another step of the same layer has."""
    lens = [torch.zeros(requests, dtype=torch.int32) for _ in range(3)]
    step = ExtendStep(
        source=torch.zeros(5, 128, dtype=torch.int32),
        req_rows=torch.zeros(requests, dtype=torch.int64),
        query_offsets=torch.zeros(requests + 1, dtype=torch.int32),
        prefix_lens=lens[0],
        pool_lens=None if new else lens[1],
        kv_start=lens[2],
    )
    k, v = (halves(tokens, 2, 64), halves(tokens, 2, 64)) if new else (None, None)
    return {"q": halves(tokens, 4, 64), "k": k, "v": v, "step": step, "out": halves(tokens, 4, 64)}


def as_launched(kernel: Kernel) -> tuple[Any, ...]:
    """What the compiled kernel is to be run with after its last ordinary launch."""
    grid, args, options = kernel.launches[-1]
    values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
    constants = [v for n, v in options.items() if n not in ("num_warps", "num_stages")]
    return (*grid, 1, 1, STREAM, "function", "metadata", None, None, None, *values, *constants)


def alike(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Descriptors by what they describe."""
    plain = [[vars(x) if is_descriptor(x) else x for x in each] for each in (left, right)]
    for each in plain:
        for at, x in enumerate(each):
            if isinstance(x, dict):
                each[at] = (x["base"].data_ptr(), x["shape"], x["strides"], x["block_shape"])
    return plain[0] == plain[1]


VARIANTS = (Variant(0.25), Variant(0.25, cap=3.0, window=9, sinks=torch.zeros(4)))


@pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "features"])
@pytest.mark.parametrize("lse", [False, True])
def test_a_repeat_has_the_arguments_of_a_launch(
    config: Extend, new: bool, variant: Variant, lse: bool, kernel: Kernel
) -> None:
    """Of other steps, too, with more tokens and requests."""
    given = scene(config, new=new, variant=variant)
    for tokens, requests in ((12, 3), (12, 3), (40, 7)):
        given |= fresh_inputs(tokens, requests, new=new)
        given["lse"] = torch.zeros(tokens, 4) if lse else None
        extend(**given)
    assert len(kernel.launches) == 1
    repeated = kernel.compiled.calls[-1]
    other = Kernel()
    way = next(w for w in given["cache"].memo.values() if isinstance(w, extend_repeats.Way))
    way.repeats.clear()
    way.kernel = other
    extend(**given)
    assert alike(repeated, as_launched(other))


@pytest.mark.parametrize(
    "change",
    [
        {"lse": torch.zeros(12, 4)},
        {"variant": Variant(0.25, cap=1.0)},
        {"config": DESCRIPTORS},
        {"heads": Heads(4, 4, 64, 64)},
        {"anchor": True},
        {"q": halves(12, 4, 128)[:, :, :64]},
        {"q": torch.zeros(12, 4, 64, dtype=torch.bfloat16)},
        {"out": halves(12, 8, 64)[:, ::2]},
        {"k": halves(12, 2, 64), "v": halves(12, 2, 64)},
    ],
    ids=["lse", "variant", "config", "heads", "anchor", "strides", "dtype", "strides of out", "k and v"],
)
def test_other_calls_are_found_anew(change: dict[str, Any], kernel: Kernel) -> None:
    given = scene()
    extend(**given)
    before = len(given["cache"].memo)
    extend(**given | change)
    assert len(given["cache"].memo) > before


@pytest.mark.parametrize(
    "changed",
    [
        lambda step: replace(step, positions=torch.zeros(12, dtype=torch.int64)),
        lambda step: replace(step, positions=torch.zeros(12, dtype=torch.int32)),
        lambda step: replace(step, key_offsets=torch.zeros(4, dtype=torch.int32)),
        lambda step: replace(step, pool_lens=None),
        lambda step: replace(step, source=torch.zeros(5, 256, dtype=torch.int32)),
        lambda step: replace(
            step,
            mask_cells=torch.zeros(64, dtype=torch.bool),
            mask_indptr=torch.zeros(4, dtype=torch.int64),
        ),
    ],
    ids=["positions", "short positions", "key offsets", "no pool", "wider table", "mask"],
)
def test_other_steps_are_found_anew(changed: Callable[[ExtendStep], ExtendStep], kernel: Kernel) -> None:
    given = scene()
    extend(**given)
    extend(**given | {"step": replace(given["step"], positions=torch.zeros(12, dtype=torch.int8))})
    before = len(given["cache"].memo)
    extend(**given | {"step": changed(given["step"])})
    assert len(given["cache"].memo) > before


def test_odd_addresses_are_another_launch(kernel: Kernel) -> None:
    """A kernel is compiled for aligned ones, or for those that aren't."""
    given = scene()
    extend(**given)
    odd = torch.zeros(8, dtype=torch.int32)[1:4]
    for _ in range(2):
        extend(**given | {"step": replace(given["step"], prefix_lens=odd)})
    way = next(w for w in given["cache"].memo.values() if isinstance(w, extend_repeats.Way))
    assert sorted(len(odds) for _, odds in way.repeats) == [0, 13]


def encoding_launcher(calls: list[Any], encoded: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """As Triton's: a Python function around a C function, which encodes descriptors in every call."""
    tensordesc_meta = ["first", "second"]

    def encode(x: Any, kind: str) -> list[Any]:
        encoded.append(kind)
        return [(x.base.data_ptr(), kind), *x.shape]

    def launcher(*args: Any) -> None:
        calls.append(args)

    def inner(*args: Any) -> None:
        assert tensordesc_meta
        launcher(*args)

    inner.__module__ = "triton.backends.nvidia.driver"
    driver = SimpleNamespace(make_tensordesc_arg=encode)
    monkeypatch.setitem(__import__("sys").modules, "triton.backends.nvidia.driver", driver)
    return inner


def test_descriptors_are_encoded_once_for_an_address(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    encoded: list[Any] = []
    kernel.compiled.run = encoding_launcher(calls, encoded, monkeypatch)  # type: ignore[method-assign]
    given = scene(DESCRIPTORS, new=True)
    for _ in range(4):
        extend(**given)
    assert encoded == ["first", "second"]
    k, v = given["k"], given["v"]
    front = (STREAM, "function", "metadata", None, None, None, given["q"].data_ptr())
    assert calls[-1][3:10] == front
    assert calls[-1][10:16] == ((k.data_ptr(), "first"), 12, 128, (v.data_ptr(), "second"), 12, 128)
    given |= {"v": v.clone()}
    extend(**given)
    assert encoded == ["first", "second"] * 2
    held = [weakref.ref(x) for x in (k, v)]
    del k, v
    given |= {"k": halves(12, 2, 64)}
    kernel.launches.clear()
    gc.collect()
    assert [ref() for ref in held] == [None, None], "what was encoded keeps no tensor alive"


def test_encoded_descriptors_are_bounded(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.compiled.run = encoding_launcher([], [], monkeypatch)  # type: ignore[method-assign]
    monkeypatch.setattr(extend_repeats, "_MOST", 3)
    given = scene(DESCRIPTORS, new=True)
    kept = []
    for _ in range(9):
        kept.append(halves(12, 2, 64))
        extend(**given | {"v": kept[-1]})
    way = next(w for w in given["cache"].memo.values() if isinstance(w, extend_repeats.Way))
    (repeat,) = way.repeats.values()
    assert 1 <= len(repeat._known) <= 3
