"""K and V must be read in vectors: what is counted in assembly, and that a lost alignment hint fails."""

# ruff: noqa: ANN001, ANN201  (inside a kernel, annotations mean constexpr to Triton)
import os

import pytest

pytest.importorskip("triton", reason="the portable extra isn't installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels can't be compiled", allow_module_level=True)

import aot_samples
import triton
import triton.language as tl

from anyattn.kernels.triton import decode, decode_launch, decode_pairs, extend, extend_launch
from anyattn.kernels.triton.aot import TARGETS, measure, scalar_reads
from anyattn.kernels.triton.aot_usage import Usage, async_copies, global_loads, nvidia_usage
from anyattn.kernels.triton.configs.aot import ENTRIES

BY_NAME = {entry.name: entry for entry in ENTRIES}


@triton.jit
def unhinted_offsets(
    first, page_stride, row_stride,
    PAGE: tl.constexpr, SUB: tl.constexpr, N: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`common.page_offsets` without `tl.multiple_of`."""
    base = first * row_stride
    rows = tl.arange(0, SUB) * row_stride
    return tl.reshape(base[:, None] + rows[None, :], [N])


@pytest.fixture
def lost_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_stream", triton.JITFunction(decode._stream.fn))
    monkeypatch.setattr(decode, "stream_pairs", triton.JITFunction(decode_pairs.stream_pairs.fn))
    monkeypatch.setattr(decode_pairs, "page_offsets", unhinted_offsets)
    for module, host, name in (
        (decode, decode_launch, "decode_kernel"),
        (extend, extend_launch, "extend_kernel"),
    ):
        monkeypatch.setattr(module, "page_offsets", unhinted_offsets)
        # A kernel of its own: the shipped one keeps what it was compiled with.
        monkeypatch.setattr(host, name, triton.JITFunction(getattr(module, name).fn))


@pytest.mark.skipif(
    not triton.__version__.startswith(("3.6.", "3.7.")),
    reason="this Triton finds the vectors without the hint",
)
@pytest.mark.parametrize("target", ["sm_90", "gfx942", "gfx1201"])
@pytest.mark.parametrize("name", ["decode/d128", "decode/d128-fp8", "extend/d128-paged"])
def test_a_lost_hint_fails(lost_hint: None, name: str, target: str) -> None:
    report = measure(BY_NAME[name], TARGETS[target])
    assert report.usage is not None
    assert any(problem.startswith("scalar loads: ") for problem in report.problems)
    if target == "sm_90":
        assert any(problem.startswith("cp.async: ") for problem in report.problems)


def test_the_shipped_kernel_reads_vectors() -> None:
    report = measure(BY_NAME["decode/d128"], TARGETS["sm_90"])
    assert report.problems == []
    assert report.usage is not None
    assert report.usage.copies == {16: report.usage.copies[16]}
    assert report.usage.copies[16] >= 16


def test_every_attention_entry_is_judged() -> None:
    judged = {entry.name: entry.element for entry in ENTRIES}
    assert judged["decode/d128"] == judged["extend/d128"] == 2
    assert judged["decode/d128-fp8"] == 1
    assert judged["extend/d128-float32"] == 4
    assert judged["merge/d128"] == judged["metadata/token-csr"] == 0
    for entry in ENTRIES:
        assert bool(entry.element) == entry.name.startswith(("decode/", "extend/", "verify/")), entry.name


def test_loads_of_ptx_are_counted() -> None:
    ptx = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.b16 { %rs1 }, [ %rd2 + 0 ];
    ld.global.L1::evict_last.L2::cache_hint.v2.b64 { %rd3, %rd4 }, [ %rd5 ], %rd6;
    ld.global.nc.u32 %r5, [%rd7];
    ld.shared.v4.b32 {%r1}, [%r2];
    cp.async.cg.shared.global [ %r6 + 0 ], [ %rd8 + 0 ], 0x10, %r7;
    cp.async.ca.shared.global [ %r6 + 0 ], [ %rd8 + 0 ], 0x4, %r7;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], [%r4];
    cp.async.commit_group;
    """
    assert async_copies(ptx) == {4: 1, 16: 2}
    assert global_loads(ptx, "cuda") == {2: 1, 4: 2, 16: 4}
    usage = nvidia_usage("REG:32 STACK:0 SHARED:0 LOCAL:0", 0, ptx, 256)
    assert (usage.loads, usage.copies, usage.tensor_memory) == ({2: 1, 4: 2, 16: 4}, {4: 1, 16: 2}, 256)


def test_loads_of_amd_assembly_are_counted() -> None:
    text = """
    global_load_dwordx4 v[1:4], v[2:3], off
    buffer_load_ushort v1, v2, s[0:3], 0 offen
    global_load_d16_b16 v1, v[2:3], off
    global_load_d16_hi_b16 v1, v[2:3], off
    global_load_short_d16_hi v1, v[2:3], off
    global_load_ubyte_d16 v1, v[2:3], off
    buffer_load_u8 v1, v2, s[0:3], 0 offen
    global_load_b128 v[1:4], v[2:3], off
    global_load_lds_dwordx4 v[1:2], off
    buffer_load_dword v1, s[0:3], 0 offen lds
    flat_load_b64 v[1:2], v[3:4]
    s_load_dwordx4 s[0:3], s[4:5], 0x0
    global_store_dwordx4 v[1:2], v[3:6], off
    """
    assert global_loads(text, "hip") == {1: 2, 2: 4, 4: 1, 8: 1, 16: 3}


@pytest.mark.parametrize(
    ("loads", "copies", "element", "found"),
    [
        ({4: 24, 16: 66}, {16: 64}, 2, []),
        ({2: 16, 16: 66}, {16: 64}, 2, []),  # sinks
        ({1: 32, 16: 5}, {16: 4}, 2, []),  # mask cells
        ({4: 12, 16: 10}, {16: 8}, 4, []),  # table entries
        ({2: 128, 16: 2}, {}, 2, ["scalar loads", "cp.async"]),
        ({4: 64, 16: 66}, {4: 32, 16: 32}, 2, ["cp.async"]),  # half of the alignment lost
        ({1: 128, 16: 3}, {}, 1, ["scalar loads", "cp.async"]),
        ({4: 138, 16: 4}, {4: 128}, 4, ["scalar loads", "cp.async"]),
    ],
)
def test_the_rule(loads: dict[int, int], copies: dict[int, int], element: int, found: list[str]) -> None:
    usage = Usage(0, 32, loads=loads, copies=copies)
    problems = scalar_reads(usage, element, TARGETS["sm_80"])
    assert [problem.partition(":")[0] for problem in problems] == found
    amd = scalar_reads(usage, element, TARGETS["gfx942"])
    assert [problem.partition(":")[0] for problem in amd] == [f for f in found if f != "cp.async"]


def test_tensor_memory_is_held_against_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    good = aot_samples.ENTRIES[0]
    monkeypatch.setattr("anyattn.kernels.triton.aot.TENSOR_COLUMNS", 16)
    report = measure(good, TARGETS["sm_100"])
    assert "tensor memory" in report.problems[0]
