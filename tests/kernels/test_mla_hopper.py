"""Hopper's latent kernels, compiled: they fit without spills, products aren't serialised; who gets them."""

import os
import subprocess
import tempfile

import pytest
import torch

pytest.importorskip("triton", reason="the portable extra isn't installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels can't be compiled", allow_module_level=True)

import triton

from anyattn.kernels.triton.aot import TARGETS, compile_launch, measure, record
from anyattn.kernels.triton.configs.aot_mla import HOPPER
from anyattn.kernels.triton.configs.mla import MLATiles
from anyattn.kernels.triton.mla import extend_blocks, head_blocks
from anyattn.kernels.triton.mla_hopper_launch import GLUON_VERSIONS, PORTABLE, mla_forms, pack_of

ENTRIES = {entry.name.partition("/")[2]: entry for entry in HOPPER}
compiled = pytest.mark.skipif(
    not triton.__version__.startswith(GLUON_VERSIONS), reason="Gluon of another version"
)


@compiled
@pytest.mark.parametrize("name", ["decode-16-heads-fp8", "decode-128-heads-fp8", "extend-128-heads-mask"])
def test_it_fits_without_spills(name: str) -> None:
    report = measure(ENTRIES[name], TARGETS["sm_90"])
    assert report.problems == []
    assert report.usage is not None
    assert any(kind.startswith("wgmma") for kind in report.usage.matrix)
    assert set(report.usage.copies) == {16}


@compiled
@pytest.mark.parametrize("name", ["decode-16-heads", "decode-128-heads", "extend-16-heads"])
def test_products_are_not_serialised(name: str) -> None:
    """`ptxas` only remarks on it, and the kernel stays right: it would merely be slow."""
    target = TARGETS["sm_90"]
    ptx = compile_launch(record(ENTRIES[name], target), target).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-arch=sm_90a", "-v", file.name, "-o", os.devnull]
        remarks = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "registers" in remarks
    assert "serialized" not in remarks


BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("arch", "dtype", "stored", "rank", "rope", "cap", "version"),
    [
        ("sm100", BF16, BF16, 512, 64, None, "3.6.0"),
        ("sm90", torch.float32, torch.float32, 512, 64, None, "3.6.0"),
        ("sm90", BF16, FP16, 512, 64, None, "3.6.0"),
        ("sm90", BF16, torch.float32, 512, 64, None, "3.6.0"),
        ("sm90", BF16, BF16, 256, 64, None, "3.6.0"),
        ("sm90", BF16, BF16, 512, 32, None, "3.6.0"),
        ("sm90", BF16, BF16, 512, 64, 30.0, "3.6.0"),
        ("sm90", BF16, BF16, 512, 64, None, "3.4.0"),
    ],
)
def test_others_stay_with_the_portable_kernels(
    arch: str,
    dtype: torch.dtype,
    stored: torch.dtype,
    rank: int,
    rope: int,
    cap: float | None,
    version: str,
) -> None:
    assert mla_forms(arch, dtype, stored, rank, rope, cap, version) == PORTABLE


@pytest.mark.parametrize(("dtype", "stored"), [(BF16, BF16), (FP16, FP16), (BF16, FP8)])
def test_hopper_has_its_own(dtype: torch.dtype, stored: torch.dtype) -> None:
    assert mla_forms("sm90", dtype, stored, 512, 64, None, "3.7.1") == (*PORTABLE, "rows", "keys")


@pytest.mark.parametrize(
    ("heads", "pack"), [(1, 1), (16, 16), (20, 20), (64, 64), (96, 48), (128, 64), (67, 1)]
)
def test_heads_of_a_token_share_blocks(heads: int, pack: int) -> None:
    tiles = MLATiles(64, 64, 8, 2, "rows")
    assert pack_of(heads, 64) == pack
    assert head_blocks(heads, tiles) * pack == heads
    assert extend_blocks(heads, 4, tiles) == heads // pack * -(-4 // (64 // pack))
    assert head_blocks(heads, MLATiles(16, 64, 8, 2, "keys")) == -(-heads // 16)
