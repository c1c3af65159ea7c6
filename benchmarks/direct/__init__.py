"""Kernel libraries called directly, as somebody would without anyattn: what its own cost is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.direct.fa3 import fa3
from benchmarks.direct.flashinfer import flashinfer
from benchmarks.direct.flashmla import flashmla
from benchmarks.direct.recipe import NoRecipe, Recipe
from benchmarks.direct.stage import Shape, Stage
from benchmarks.direct.torch_native import torch_native
from benchmarks.direct.triton import triton

__all__ = ["RECIPES", "NoRecipe", "Recipe", "Shape", "Stage"]

RECIPES: Mapping[str, Callable[[Stage], Recipe]] = {
    "triton": triton,
    "flashinfer": flashinfer,
    "fa3": fa3,
    "flashmla": flashmla,
    "torch_native": torch_native,
}
"""Backend -> how its library is called without us."""
