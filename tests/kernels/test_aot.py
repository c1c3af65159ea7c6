"""Ahead-of-time compilation: what is read from binaries, what is judged; the shipped list compiles."""

import json
import os

import pytest

pytest.importorskip("triton", reason="the portable extra isn't installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels can't be compiled", allow_module_level=True)

import aot_samples

from anyattn.cli.compile_table import markdown
from anyattn.cli.main import main
from anyattn.errors import ConfigError, LibraryError
from anyattn.kernels.triton.aot import ALL_TARGETS, RELATED, TARGETS, measure, record
from anyattn.kernels.triton.aot_pool import Job, compile_all
from anyattn.kernels.triton.aot_report import Report
from anyattn.kernels.triton.aot_usage import amd_usage, matrix_instructions, nvidia_usage
from anyattn.kernels.triton.configs import aot_attention
from anyattn.kernels.triton.configs.aot import ENTRIES, MAX_ENTRIES

SAMPLES = {entry.name: entry for entry in aot_samples.ENTRIES}
SAMPLE_LIST = "aot_samples:ENTRIES"


def test_the_shipped_list_is_well_formed() -> None:
    assert len(ENTRIES) <= MAX_ENTRIES
    entries = {entry.name: entry for entry in (*ENTRIES, *aot_attention.ENTRIES)}
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    for entry in entries.values():
        assert entry.targets
        assert set(entry.targets) <= set(TARGETS)
        assert set(entry.spills) <= set(entry.targets)
        for target in entry.targets:  # the host functions still take what the entry passes
            launch = record(entry, TARGETS[target])
            assert launch.constexprs


def test_a_third_of_the_shipped_entries_compiles() -> None:
    """Each on one of its chips, all chips in turn; the whole list is `make compile-table`."""
    jobs = []
    for index, entry in enumerate(ENTRIES[::3]):
        jobs.append(Job(entry.name, entry.targets[(4 * index + 3) % len(entry.targets)]))
    reports = compile_all(jobs)
    assert [(r.entry, r.target) for r in reports] == [(j.entry, j.target) for j in jobs]
    assert not [(r.entry, r.target, r.problems) for r in reports if r.problems]
    for report in reports:
        assert report.usage is not None
        assert 0 < report.usage.registers <= 512
        assert report.usage.shared <= report.shared_limit


@pytest.mark.parametrize(
    ("target", "instruction"),
    [
        ("sm_80", "mma.sync m16n8k16"),
        ("sm_90", "wgmma m64n64k16"),
        ("sm_100", "tcgen05 kind::f16"),
        ("gfx942", "v_mfma_f32_"),
        ("gfx1201", "v_wmma_f32_16x16x16_f16"),
    ],
)
def test_matrix_instruction_of_each_family(target: str, instruction: str) -> None:
    report = measure(SAMPLES["good"], TARGETS[target])
    assert report.problems == []
    assert report.usage is not None
    assert report.usage.matrix[0].startswith(instruction)
    assert report.signature["a"] == "*fp16"
    assert report.signature["n"] == "i32"


def test_related_chips_take_their_relatives_entries(capsys: pytest.CaptureFixture[str]) -> None:
    for target in RELATED.values():
        relative = TARGETS[target.like]
        assert (target.backend, target.warp_size, target.shared_limit) == (
            relative.backend,
            relative.warp_size,
            relative.shared_limit,
        )
    assert main(["verify-compile", "--list", "--entry", "decode/d128-fp8", "--target", "sm_103"]) == 0
    assert capsys.readouterr().out.strip() == "decode/d128-fp8: sm_103"
    assert main(["verify-compile", "--list", "--entry", "decode/d128-fp8", "--target", "gfx1151"]) == 0
    assert capsys.readouterr().out.strip() == ""  # nor has gfx1100 fp8
    report = measure(SAMPLES["good"], ALL_TARGETS["gfx1200"])
    assert report.problems == []


def test_shared_memory_limits() -> None:
    """KiB a thread block may have: the CUDA Programming Guide's table 31, AMD's GPU specifications."""
    limits = {name: target.shared_limit // 1024 for name, target in ALL_TARGETS.items()}
    assert limits == {
        **dict.fromkeys(("sm_80", "sm_87"), 163),
        **dict.fromkeys(("sm_86", "sm_89", "sm_120", "sm_121"), 99),
        **dict.fromkeys(("sm_90", "sm_100", "sm_103", "sm_110"), 227),
        **dict.fromkeys(("gfx90a", "gfx942", "gfx1100", "gfx1151", "gfx1200", "gfx1201"), 64),
        "gfx950": 160,
    }
    assert {t.warp_size for name, t in ALL_TARGETS.items() if name.startswith("gfx1")} == {32}


def test_shared_memory_is_held_against_the_chip() -> None:
    """The same configuration fits an A100 and not a chip with 99 KB."""
    fits, too_large = (measure(SAMPLES["large"], TARGETS[name]) for name in ("sm_80", "sm_86"))
    assert fits.usage is not None
    assert 99 * 1024 < fits.usage.shared <= fits.shared_limit
    assert fits.problems == []
    assert "shared memory" in too_large.problems[0]


def test_spills_need_a_reason() -> None:
    bare, excused = (measure(SAMPLES[name], TARGETS["sm_80"]) for name in ("spilling", "excused"))
    assert bare.usage is not None
    assert bare.usage.spill_bytes > 0
    assert "spills" in bare.problems[0]
    assert excused.problems == []
    assert "asked for on purpose" in excused.notes[0]


def test_an_entry_is_one_launch() -> None:
    assert record(SAMPLES["second"], TARGETS["sm_80"]).kernel.__name__ == "product_kernel"
    with pytest.raises(ConfigError, match="broken_kernel, product_kernel"):
        record(SAMPLES["ambiguous"], TARGETS["sm_80"])


def test_bad_jobs_end_alone() -> None:
    """A compiler error and a process that aborts are reports; the rest goes on."""
    names = ["aborting", "broken", "ambiguous", "second"]
    jobs = [Job(name, "sm_80", SAMPLES[name].kernel or "", 1) for name in names]
    reports = compile_all(jobs, source=SAMPLE_LIST)
    problems = {report.entry: " ".join(report.problems) for report in reports}
    assert list(problems) == names
    assert "ended with code -6: LLVM ERROR: sample" in problems["aborting"]
    assert "no_such_name" in problems["broken"]
    assert "must stand for one launch" in problems["ambiguous"]
    assert problems["second"] == ""
    assert reports[0].kernel == "abort_kernel"


def test_a_compilation_has_its_time() -> None:
    (report,) = compile_all([Job("hanging", "sm_80")], source=SAMPLE_LIST, timeout=6)
    assert report.problems == ["not compiled after 6 s"]
    assert report.usage is None


def test_resources_are_read() -> None:
    dump = "Function f:\n  REG:255 STACK:72 SHARED:1024 LOCAL:0 CONSTANT[0]:744\n"
    ptx = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1};\nldmatrix.sync.aligned.m8n8.x4"
    usage = nvidia_usage(dump, 4096, ptx)
    assert (usage.registers, usage.spill_bytes, usage.shared) == (255, 72, 4096)
    assert usage.matrix == ("mma.sync m16n8k16",)
    with pytest.raises(LibraryError):
        nvidia_usage("", 0, "")
    text = (
        "; Occupancy: 5\n .private_segment_fixed_size: 408\n .vgpr_count: 256\n .vgpr_spill_count: 101\n"
        "v_wmma_f32_16x16x16_bf16 v[0:7]\n"
    )
    usage = amd_usage(text, 512)
    assert (usage.registers, usage.spilled_registers, usage.spill_bytes, usage.occupancy) == (
        256,
        101,
        408,
        5,
    )
    assert usage.spills == "101 registers, 408 B"
    assert usage.matrix == ("v_wmma_f32_16x16x16_bf16",)


def test_matrix_instructions_are_counted() -> None:
    ptx = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 x;\n" * 2 + "mma.sync.aligned.m16n8k8.row y;"
    assert matrix_instructions(ptx, "cuda") == ("wgmma m64n128k16", "mma.sync m16n8k8")
    assert matrix_instructions("tcgen05.mma.cta_group::1.kind::f16 [a]", "cuda") == ("tcgen05 kind::f16",)
    assert matrix_instructions("v_add_f32 v0, v1", "hip") == ()


def test_command_writes_table_and_json(
    tmp_path: os.PathLike[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = os.path.join(tmp_path, "table.md")
    asked = ["--configs", SAMPLE_LIST, "--entry", "good", "--entry", "spilling", "--target", "sm_80"]
    assert main(["verify-compile", *asked, "--json", "--write", file]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [row["ok"] for row in document["configurations"]] == [True, False]
    assert document["ok"] is False
    with open(file) as stream:
        text = stream.read()
    assert "## good" in text
    assert "mma.sync m16n8k16" in text
    assert "**spills" in text


def test_command_refuses_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["verify-compile", "--target", "sm90"]) == 2
    assert "did you mean 'sm_90'" in capsys.readouterr().err
    assert main(["verify-compile", "--entry", "nothing-like-it"]) == 2
    assert main(["verify-compile", "--configs", "no.such:LIST"]) == 2
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["verify-compile"]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def test_a_failed_compilation_has_a_row() -> None:
    report = Report("x/y", "k", "sm_80", 1, problems=["it broke"])
    assert "| sm_80 |  | ,  | **failed** |" in markdown([report], {"triton": "0"}, seconds=1, workers=2)
