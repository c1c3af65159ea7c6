"""The fused filler is offered where Triton can compile, and nowhere else."""

from __future__ import annotations

import importlib.util
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anyattn.backends.cuda.fused_tables import offer_filler
from anyattn.core.kv import RequestTable

TABLE = RequestTable(max_requests=2, max_context=8, device="cpu")


def compiler(device: str) -> Any:
    uploader = SimpleNamespace(pull=None)
    return SimpleNamespace(device=torch.device(device), filler=None, uploader=uploader)


def test_a_gpu_with_triton_and_a_compiler_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from anyattn.kernels.triton.metadata_launch import FusedFiller
    from anyattn.kernels.triton.pull_launch import Puller

    monkeypatch.setenv("CC", "cc")
    given = compiler("cuda")
    assert offer_filler(given, TABLE)
    assert isinstance(given.filler, FusedFiller)
    assert isinstance(given.uploader.pull, Puller)


def test_others_keep_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    given = compiler("cpu")
    assert not offer_filler(given, TABLE)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    without = compiler("cuda")
    assert not offer_filler(without, TABLE)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not offer_filler(without, TABLE)
    assert given.filler is without.filler is None
    assert given.uploader.pull is without.uploader.pull is None
