"""One launch for K and V: what the kernel is given, and where it isn't offered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash_stands import TOKENSPEED

import anyattn
from anyattn.backends.cuda import fused_writes
from anyattn.backends.cuda.fused_writes import FusedWriter, FusedWrites, offer_writer
from anyattn.core.kv import MHAPool
from anyattn.testing.emulators import emulating
from benchmarks.direct import Shape, Stage

CPU = torch.device("cpu")
SPEC = anyattn.AttentionSpec(num_q_heads=2, num_kv_heads=2, head_dim=16)


def _pool(**options: Any) -> MHAPool:
    dtype = {"kv_dtype": torch.bfloat16, "dtype": torch.bfloat16} | options
    return MHAPool([SPEC, SPEC], num_slots=16, page_size=4, **dtype)


def test_offered_where_triton_launches_and_slots_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offer_writer(_pool()) is None, "a CPU launches nothing"
    monkeypatch.setattr(fused_writes, "triton_launches", lambda device: True)
    assert isinstance(offer_writer(_pool(layout="HND")), FusedWriter)
    assert offer_writer(_pool(layout="PAGED_5D")) is None


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_kernel_gets_the_layers_storage_and_scales(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = _pool(layout=layout, kv_dtype=torch.float8_e4m3fn)
    pool.set_scales(1, 0.5, [1.0, 2.0])
    given: list[Any] = []
    writer = FusedWriter(pool)
    monkeypatch.setattr(writer._kernels, "kv_write", lambda *args: given.append(args))
    k, v, loc = torch.zeros(3, 2, 16), torch.ones(3, 2, 16), torch.tensor([4, 5, 9])
    for layer in (0, 1, 1):
        writer(layer, loc, k, v)
    assert all(args[0] is k and args[1] is v and args[3] is loc for args in given)
    first, second, third = (args[2] for args in given)
    assert second is third
    assert (first.scaled, second.scaled) == (False, True)
    assert second.k.data_ptr() == pool.key_cache(1).data_ptr()
    assert second.v_scale.tolist() == [1.0, 2.0]
    assert (second.page, second.k_strides) == (4, (128, 32, 16) if layout == "NHD" else (128, 16, 64))


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("flashinfer", "cuda:sm90"),
        ("fa3", TOKENSPEED),
        ("fa4", "cuda:sm100"),
        ("trtllm_mha", "cuda:sm100"),
        ("hpc_ops", "cuda:sm90"),
    ],
)
def test_vendors_without_a_writer_use_it(name: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a layer in place of two copies by index; layers that share KV store nothing."""
    with emulating(name, host):
        stage = Stage(name, Shape(requests=2, length=70, layers=2, num_q=8, num_kv=1), CPU, host=host)
        assert isinstance(stage.backend, FusedWrites)
        given: list[int] = []

        def write(layer: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            given.append(layer)
            stage.pool.write(layer, loc, k, v)

        monkeypatch.setattr(stage.backend, "_writer", write)
        plan = stage.backend.init_forward_metadata(stage.batches[0])
        with anyattn.forward_context(stage.backend, plan):
            for layer in (0, 1):
                stage.layers[layer](stage.q, stage.k, stage.v, stage.batches[0])
    assert given == [0, 1]
