"""FlashInfer's stand-in, the planned MLA wrapper in both of its forms."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_pages import Pages, close, offsets_of, pages, queries

from anyattn.testing.emulators import EmulationError, emulating

LENGTHS, ROWS, PAGE, HEADS, BF16, FP8 = [7, 40], [2, 3], 16, 16, torch.bfloat16, torch.float8_e4m3fn
SIZES: dict[str, Any] = {
    "num_heads": HEADS, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": PAGE, "causal": True,
    "sm_scale": 0.07, "q_data_type": BF16, "kv_data_type": BF16,
}  # fmt: skip


@pytest.fixture(name="mla")
def _mla() -> Iterator[Any]:
    with emulating("flashinfer_mla") as emulator, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield emulator.modules()["flashinfer.mla"]


def scene(dtype: torch.dtype = BF16) -> tuple[Pages, tuple[torch.Tensor, ...]]:
    """Latents in pages, and the CSR tables of a plan."""
    w = pages(LENGTHS, page=PAGE, heads=1, dim=576, dtype=dtype)
    w.values = w.keys[..., :512]
    counts = [-(-n // PAGE) for n in LENGTHS]
    indices = torch.cat([w.table[i, :n] for i, n in enumerate(counts)])
    return w, (offsets_of(ROWS), offsets_of(counts), indices, w.lengths)


def wrapper(mla: Any, backend: str = "fa3", **options: Any) -> Any:
    return mla.BatchMLAPagedAttentionWrapper(torch.zeros(1024, dtype=torch.uint8), backend=backend, **options)


@pytest.mark.parametrize("backend", ["fa2", "fa3", "auto"])
def test_metadata_and_packed_tensors(mla: Any, backend: str) -> None:
    w, tables = scene()
    q, mine = queries(5, HEADS, 576, BF16), wrapper(mla, backend)
    mine.plan(metadata=mla.MLAPlanMetadata.csr(*tables), lse_mode="basee", **SIZES)
    out, lse = mine.run(query=q, kv_cache=w.keys[:, :, 0], return_lse=True, return_lse_base_on_e=True)
    want = w.expected(q, ROWS, scale=0.07)
    assert close(out, want[0], 1e-2)
    assert torch.allclose(lse.double(), want[1], atol=1e-4)
    with pytest.raises(ValueError, match="LSE mode"):  # what is planned is what is asked for
        mine.run(query=q, kv_cache=w.keys[:, :, 0])
    parts = w.keys[:, :, 0, :512].contiguous(), w.keys[:, :, 0, 512:].contiguous()
    with pytest.raises(ValueError, match="zero-copy"):
        mine.run(query=q, kv_cache=parts, return_lse=True, return_lse_base_on_e=True)


def test_flat_arguments_and_split_tensors(mla: Any) -> None:
    w, tables = scene()
    q, mine = queries(5, HEADS, 576, BF16), wrapper(mla)
    mine.plan(*tables, *SIZES.values())
    cache = w.keys[:, :, 0]
    out, lse = mine.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], return_lse=True)
    want = w.expected(q, ROWS, scale=0.07)
    assert close(out, want[0], 1e-2)
    assert torch.allclose(lse.double() * math.log(2), want[1], atol=1e-4)


def test_block_tables_become_pages(mla: Any) -> None:
    w, tables = scene()
    q, mine = queries(5, HEADS, 576, BF16), wrapper(mla)
    mine.plan(metadata=mla.MLAPlanMetadata.dense(tables[0], w.table, w.lengths), **SIZES)
    assert close(mine.run(query=q, kv_cache=w.keys[:, :, 0]), w.expected(q, ROWS, scale=0.07)[0], 1e-2)


def test_refusals(mla: Any) -> None:
    _, tables = scene()
    csr, mine = mla.MLAPlanMetadata.csr, wrapper(mla)
    with pytest.raises(RuntimeError, match="before plan"):
        mine.run(query=0, kv_cache=0)
    last = torch.tensor([7, 8], dtype=torch.int32)  # tokens in the last page are no token counts
    with pytest.raises(ValueError, match="page counts"):
        mine.plan(metadata=csr(*tables[:3], last), **SIZES)
    with pytest.raises(ValueError, match="int32"):
        mine.plan(metadata=csr(tables[0].long(), *tables[1:]), **SIZES)
    with pytest.raises(ValueError, match="Both metadata"):
        mine.plan(*tables, metadata=csr(*tables), **SIZES)
    with pytest.raises(TypeError, match="required"):
        mine.plan(metadata=csr(*tables))
    with pytest.raises(ValueError, match="KV dtype"):
        mine.plan(metadata=csr(*tables), **{**SIZES, "kv_data_type": torch.float16})
    with pytest.raises(EmulationError, match="MLA wrapper"):
        wrapper(mla, "cutlass")
    graph = wrapper(mla, use_cuda_graph=True)
    with pytest.raises(ValueError, match="reserved buffers"):
        graph.plan(metadata=csr(*tables), **SIZES)


def test_fp8_latents_need_both_scales(mla: Any) -> None:
    w, tables = scene(FP8)
    q, mine = queries(5, HEADS, 576, BF16), wrapper(mla)
    mine.plan(metadata=mla.MLAPlanMetadata.csr(*tables), **{**SIZES, "kv_data_type": FP8})
    with pytest.raises(ValueError, match="kpe_scale"):
        mine.run(query=q, kv_cache=w.keys[:, :, 0], ckv_scale=0.5)
    out = mine.run(query=q, kv_cache=w.keys[:, :, 0], ckv_scale=0.5, kpe_scale=0.5)
    assert close(out, w.expected(q, ROWS, scale=0.07, k_scale=0.5, v_scale=0.5)[0], 1e-2)


def test_heads_that_cut_a_tile_at_a_key_tile_are_refused(mla: Any) -> None:
    """128 rows of 40 heads end inside the fourth token: refused where its own key begins a tile of 64."""
    tables = (offsets_of([4]), offsets_of([5]), torch.arange(1, 6, dtype=torch.int32))
    sizes = {**SIZES, "num_heads": 40}
    refused, taken = 65, 66
    for length in (taken, refused):
        metadata = mla.MLAPlanMetadata.csr(*tables, torch.tensor([length], dtype=torch.int32))
        if length == taken:
            wrapper(mla).plan(metadata=metadata, **sizes)
            continue
        with pytest.raises(ValueError, match="causal tile boundary"):
            wrapper(mla).plan(metadata=metadata, **sizes)


def test_auto_is_unstable_on_sm100() -> None:
    with emulating("flashinfer_mla", "cuda:sm100") as emulator, pytest.raises(EmulationError, match="anew"):
        wrapper(emulator.modules()["flashinfer.mla"], "auto")
