"""No kernel hands out shared memory that a copy is still on its way to: proven from where things lie."""

import os
import re

import pytest

pytest.importorskip("triton", reason="the portable extra isn't installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels can't be compiled", allow_module_level=True)

import triton

from anyattn.kernels.triton.aot import TARGETS, compile_launch, record
from anyattn.kernels.triton.aot_pool import load_entries
from anyattn.kernels.triton.aot_shared import late_copies, placed
from anyattn.kernels.triton.configs.aot_mla import HOPPER
from anyattn.kernels.triton.mla_hopper_launch import GLUON_VERSIONS

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith(GLUON_VERSIONS), reason="Gluon of another version"
)
ENTRIES = {entry.name: entry for entry in HOPPER} | {
    name: entry for name, entry in load_entries().items() if name.endswith("-hopper")
}


def laid_out(name: str) -> str:
    launch = record(ENTRIES[name], TARGETS["sm_90"])
    return placed(compile_launch(launch, TARGETS["sm_90"]).asm["ttgir"], 90)


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_no_copy_is_late(name: str) -> None:
    text = laid_out(name)
    assert "allocation.offset" in text
    assert late_copies(text) == []


@pytest.mark.parametrize(
    "name",
    ["mla-hopper/extend-128-heads-mask", "mla-hopper/decode-16-heads-equal", "mla-hopper/extend-16-heads"],
)
def test_a_copy_that_nobody_waits_for_is_seen(name: str) -> None:
    """As it was: an H200 gave infinite outputs in one of sixty steps."""
    text = laid_out(name)
    *before, _last = re.findall(r".*ttg\.async_wait \{num = 0.*\n", text)
    assert before
    unawaited = (
        text[: text.rindex("ttg.async_wait")] + text[text.rindex("ttg.async_wait") :].split("\n", 1)[1]
    )
    assert any("may still be written to" in line for line in late_copies(unawaited))


def test_other_buffers_and_waits_count() -> None:
    def text(wait: str, at: int) -> str:
        return (
            "%1 = ttg.local_alloc {allocation.offset = 0 : i32} : () -> !ttg.memdesc<2x64x64xbf16, #shared>\n"
            "%2 = ttg.memdesc_index %1[%0] : x\n"
            "%3 = ttg.async_copy_global_to_local %9, %2 : x\n"
            f"{wait}\n"
            f"%4 = ttg.convert_layout %8 {{allocation.offset = {at} : i32}} : x\n"
        )

    assert late_copies(text("", 0))
    assert late_copies(text("%5 = ttg.async_wait {num = 1 : i32}", 16383))
    assert late_copies(text("", 16384)) == []
    assert late_copies(text("%5 = ttg.async_wait {num = 0 : i32}", 0)) == []
