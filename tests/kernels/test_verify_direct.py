"""Direct launches of verify and its merge, on stand-ins for compiled kernels: as by Triton's own path."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the portable extra isn't installed")

from direct_cases import HEADS, Kernel, as_run, scene, stand_ins

from anyattn.kernels.triton import verify_launch
from anyattn.kernels.triton.attention import Variant
from anyattn.kernels.triton.configs import Decode
from anyattn.kernels.triton.configs.choose_verify import Verify
from anyattn.kernels.triton.verify_launch import VerifyMasks, VerifyStep

TILES = Verify(16, 1, 3, Decode(16, 4, 2, 6, overlap=2))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    stand_ins(monkeypatch)
    found = {"verify_kernel": Kernel(), "merge_verify_kernel": Kernel()}
    for name, kernel in found.items():
        monkeypatch.setattr(verify_launch, name, kernel)
    return found


def step(masks: VerifyMasks = VerifyMasks()) -> VerifyStep:  # noqa: B008 - frozen
    lens = torch.zeros(3, dtype=torch.int32)
    table, offsets = torch.zeros(4, 128, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    return VerifyStep.of(table, torch.arange(3), lens, lens, offsets, lens, 16, HEADS, TILES, masks)


def given(dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    q, new = torch.zeros(9, 4, 16, dtype=dtype), torch.zeros(9, 2, 16, dtype=dtype)
    return {
        "q": q, "k": new, "v": new.clone(), "cache": scene()["cache"], "step": step(),
        "variant": Variant(0.25), "out": torch.zeros_like(q), "lse": None,
    }  # fmt: skip


def test_repeated_launches_have_the_same_arguments(kernels: dict[str, Kernel]) -> None:
    base, stored = given(), torch.zeros(9, 2, 16, dtype=torch.float16)
    for lse in (None, torch.zeros(9, 4)):
        for sinks in (None, torch.zeros(4)):
            for new in (None, stored):
                call = base | {"lse": lse, "variant": Variant(0.25, sinks=sinks), "k": new, "v": new}
                call |= {"cache": scene()["cache"]}
                verify_launch.verify(**call)
                verify_launch.verify(**call)
                for kernel in kernels.values():
                    assert kernel.compiled.calls[-1] == as_run(*kernel.launches[-1])
    assert [(len(k.launches), len(k.compiled.calls)) for k in kernels.values()] == [(8, 8), (4, 12)]


def test_new_steps_and_inputs_need_no_compilation(kernels: dict[str, Kernel]) -> None:
    call = given()
    for _ in range(3):
        call |= {"step": step(), "q": call["q"].clone(), "out": call["out"].clone()}
        verify_launch.verify(**call)
    assert [len(k.launches) for k in kernels.values()] == [1, 1]
    run = kernels["verify_kernel"].compiled.calls[-1]
    assert run[9:13] == tuple(call[name].data_ptr() for name in ("q", "k", "v", "out"))
    assert run[24:27] == tuple(
        getattr(call["step"].dealt, name).data_ptr() for name in ("source", "req_rows", "kv_start")
    )
    merge = kernels["merge_verify_kernel"].compiled.calls[-1]
    assert merge[9] == call["out"].data_ptr()
    assert merge[15] == call["step"].dealt.ranges.data_ptr()


def test_what_differs_is_another_kernel(kernels: dict[str, Kernel]) -> None:
    cells = torch.zeros(64, dtype=torch.bool)
    masks = VerifyMasks(verify_launch.ALL_COLUMNS, cells, torch.zeros(4, dtype=torch.int64))
    call = given()
    calls = (
        call,
        call | {"k": None, "v": None},
        call | {"step": step(masks)},
        call | {"q": torch.zeros(9, 4, 20, dtype=torch.float16)[..., :16]},
        call | {"lse": torch.zeros(9, 4)},
    )
    for count, each in enumerate(calls, 1):
        verify_launch.verify(**each)
        assert len(kernels["verify_kernel"].launches) == count


def test_odd_addresses_are_not_remembered(kernels: dict[str, Kernel]) -> None:
    odd = torch.zeros(9 * 64 + 1, dtype=torch.float16)[1:].view(9, 4, 16)
    call = given()
    verify_launch.verify(**call)
    verify_launch.verify(**(call | {"q": odd}))
    assert [len(k.launches) for k in kernels.values()] == [2, 1]
    layer = next(each for each in call["cache"].memo.values() if isinstance(each, verify_launch._Layer))
    assert len(layer.started) == 1, "of odd addresses, any may be the odd one"
