"""Wave's templates compiled for a layer: scale and cap are constants of the code, lengths are not.

Read in wave-lang 3.9.1 (`wave_lang/kernel/wave/templates/{paged_decode_attention,extend_attention}.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["SPLITS", "Compiler", "Shape"]

SPLITS = 16
"""Parts that a request's keys are cut into in decode: a constant of the code. SGLang's value on ROCm."""

_SHORT = 128
"""Query tokens of a request up to which the extend template takes its smaller tile."""

Phases = tuple[Callable[..., Any], Callable[..., Any]]


@dataclass(frozen=True)
class Shape:
    """What is compiled into a kernel. `cap` 0.0 = none."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    scale: float
    cap: float


class Compiler:
    """Compiles on first use; Wave keeps what it compiled on disk."""

    def __init__(self) -> None:
        """Raises whatever `wave_lang` raises where it can't be imported."""
        base = "wave_lang.kernel.wave"
        self._compile = importlib.import_module(f"{base}.compile")
        self._constraints = importlib.import_module(f"{base}.constraints")
        self._decode_template = importlib.import_module(f"{base}.templates.paged_decode_attention")
        self._extend_template = importlib.import_module(f"{base}.templates.extend_attention")
        self._shapes = importlib.import_module(f"{base}.templates.attention_common")
        self._scheduling = importlib.import_module(f"{base}.utils.general_utils")
        self._configs = importlib.import_module(f"{base}.utils.run_utils")
        self._decodes: dict[Shape, Phases] = {}
        self._extends: dict[tuple[Shape, bool], Callable[..., Any]] = {}

    def decode(self, shape: Shape) -> Phases:
        """`parts(q, k, v, indptr, indices, partial, lse)` and `join(partial, lse, indptr, out)`."""
        if shape not in self._decodes:
            self._decodes[shape] = self._compiled_decode(shape)
        return self._decodes[shape]

    def extend(self, shape: Shape, longest: int) -> Callable[..., Any]:
        """`kernel(q, k, v, k_cache, v_cache, q_indptr, prefix_indptr, prefix_indices, longest, out)`."""
        short = longest <= _SHORT
        if (shape, short) not in self._extends:
            self._extends[shape, short] = self._compiled_extend(shape, short)
        return self._extends[shape, short]

    def _compiled_decode(self, shape: Shape) -> Phases:
        template = self._decode_template
        sizes = template.paged_decode_attention_shape(
            num_query_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_dim,
            head_size_kv=shape.v_head_dim,
            block_size=1,
            num_seqs=1,  # dynamic
        )
        parts, join, part_constants, join_constants, part_symbols, join_symbols = (
            template.get_paged_decode_attention_kernels(
                sizes,
                self._decode_products(shape),
                SPLITS,
                input_dtype=shape.dtype,
                output_dtype=shape.dtype,
                layer_scaling=shape.scale,
                logit_cap=shape.cap,
            )
        )
        return (
            self._built(parts, part_constants, part_symbols, waves_per_eu=2),
            self._built(join, join_constants, join_symbols, waves_per_eu=4),
        )

    def _decode_products(self, shape: Shape) -> tuple[Any, Any]:
        """Matrix instructions for groups; vector dot products where every head has keys of its own."""
        names = self._constraints
        if shape.num_q_heads != shape.num_kv_heads:
            return names.MMAType.F32_16x16x16_F16, names.MMAType.F32_16x16x16_F16
        along = names.MMAOperand.M
        return (
            names.GenericDot(along_dim=along, k_vec_size=4, k_mult=1),
            names.GenericDot(along_dim=along, k_vec_size=1, k_mult=64),
        )

    def _compiled_extend(self, shape: Shape, short: bool) -> Callable[..., Any]:
        names = self._constraints.MMAType
        sizes = self._shapes.AttentionShape(
            num_query_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_dim,
            head_size_kv=shape.v_head_dim,
            max_seq_len=_SHORT if short else _SHORT + 1,
        )
        q, k, v, out = (
            (1, heads, size)  # the first axis is dynamic
            for heads, size in (
                (shape.num_q_heads, shape.head_dim),
                (shape.num_kv_heads, shape.head_dim),
                (shape.num_kv_heads, shape.v_head_dim),
                (shape.num_q_heads, shape.v_head_dim),
            )
        )
        kernel, constants, symbols = self._extend_template.get_extend_attention_kernel(
            sizes,
            (names.F32_16x16x32_K8_F16, names.F32_16x16x16_F16),
            q,
            k,
            v,
            k,
            v,
            out,
            input_dtype=shape.dtype,
            output_dtype=shape.dtype,
            size_dtype=torch.int32,
            is_causal=True,
            layer_scaling=shape.scale,
            logit_cap=shape.cap,
        )
        return self._built(
            kernel, constants, symbols, use_buffer_ops=True, denorm_fp_math_f32="preserve-sign"
        )

    def _built(self, kernel: Any, constants: Any, symbols: Any, **options: Any) -> Callable[..., Any]:
        constants.update(self._scheduling.get_default_scheduling_params())
        chosen = self._compile.WaveCompileOptions(
            subs=constants,
            canonicalize=True,
            run_bench=False,
            dynamic_symbols=symbols,
            wave_runtime=True,
            **options,
        )
        built: Callable[..., Any] = self._compile.wave_compile(
            self._configs.set_default_run_config(chosen), kernel
        )
        return built
