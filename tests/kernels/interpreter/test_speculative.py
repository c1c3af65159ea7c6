"""Tree verification and draft branches through the Triton kernels, in the interpreter."""

import sys
from pathlib import Path

import pytest
import torch

import anyattn
from anyattn.testing import oracle
from anyattn.testing.interpreter import offer_triton

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "speculative"))
from spec_drafts import run_draft
from spec_worlds import VerifyWorld


@pytest.fixture(autouse=True, scope="module")
def _on_this_cpu() -> None:
    offer_triton()


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_branches_lie_in_slots_of_any_page(page: int, layout: str) -> None:
    assert run_draft(page, page, layout=layout, backend="triton", steps=2) < 1e-5


@pytest.mark.parametrize("bounds_only", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_masks_of_both_forms(seed: int, bounds_only: bool) -> None:
    """QLEN_ONLY is spelled out on the device, also where the host knows bounds only."""
    w = VerifyWorld(seed, backend="triton")
    common = (w.world.rows, w.prefix, w.loc.tolist())
    host = {}
    if bounds_only:
        host["host_lens"] = anyattn.UpperBound(64, 8)
    outs = []
    for mode in anyattn.TreeMaskMode:
        outs.append(w.run(w.trees.batch(*common, mask=w.mask(mode), **host)))
    assert oracle.relative_error(outs[0], w.expected()) < 1e-5
    assert torch.equal(outs[0], outs[1])
