"""Stand-in for `torch_npu` 2.13 on 910B, 910C and 310P: what an attention layer calls of it, on CPU tensors.

Operators are packets with `default` and `out` overloads and the real schemas; a captured graph holds each
call as one step, and reads host lists again as an updated graph would. Read `torch_npu_fia` for where the
vendor's documents and the engines disagree. Nothing here has been compared with an NPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch

from anyattn.testing.emulators.modules import module_tree
from anyattn.testing.emulators.torch_npu_atb import flash_attention, paged_attention, splitfuse
from anyattn.testing.emulators.torch_npu_caches import (
    format_cast,
    format_of,
    reshape_and_cache,
    scatter_pa_kv_cache,
)
from anyattn.testing.emulators.torch_npu_fia import fused_infer, incre, infer_fused, infer_incre
from anyattn.testing.emulators.torch_npu_graphs import npu_names
from anyattn.testing.emulators.torch_npu_operators import Operator

__all__ = ["modules"]


def modules() -> Mapping[str, ModuleType]:
    """Fresh modules. `torch.npu`, which the real import adds, isn't: hand `torch_npu.npu` to who needs it."""
    fia = "npu_fused_infer_attention_score"
    operators = [
        Operator(fia, partial(fused_infer, v2=False), partial(infer_fused, v2=False)),
        Operator(f"{fia}_v2", partial(fused_infer, v2=True), partial(infer_fused, v2=True)),
        Operator("npu_incre_flash_attention", incre, infer_incre),
        Operator("npu_scatter_pa_kv_cache", scatter_pa_kv_cache),
        Operator("_npu_paged_attention", paged_attention),
        Operator("_npu_paged_attention_splitfuse", splitfuse),
        Operator("_npu_flash_attention", flash_attention),
        Operator("_npu_reshape_and_cache", reshape_and_cache),
    ]
    names: dict[str, Any] = {operator.__name__: operator for operator in operators}
    for operator in operators[:2]:
        names[f"_{operator.__name__}_get_max_workspace"] = _workspace
    names |= {"npu_format_cast": format_cast, "get_npu_format": format_of, "__version__": "2.13.0"}
    return module_tree({"torch_npu": names, "torch_npu.npu": npu_names()})


def _workspace(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """One-dimensional scratch of the query's dtype; how large only the device's tiling knows."""
    return torch.empty(1, dtype=query.dtype, device=query.device)
