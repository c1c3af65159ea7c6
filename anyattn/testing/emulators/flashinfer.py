"""Stand-in for FlashInfer 0.7 (`flashinfer-python`), written from the sources of 0.7.2.post1.

Not emulated, and refused: positions inside kernels (RoPE, ALiBi), NVFP4, `jit_args`, and the inner backends
cudnn, cutlass, cutile, cute-dsl-prims and cake.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from anyattn.testing.emulators import (
    flashinfer_decode,
    flashinfer_decode_graph,
    flashinfer_decode_launch,
    flashinfer_mla,
    flashinfer_prefill,
    flashinfer_ragged,
    flashinfer_sinks,
    flashinfer_states,
    flashinfer_trtllm,
    flashinfer_trtllm_mla,
)
from anyattn.testing.emulators.flashinfer_common import host_reads
from anyattn.testing.emulators.modules import module_tree

__all__ = ["VERSION", "modules"]

VERSION = "0.7.2.post1"

_HOMES: dict[str, tuple[ModuleType, ...]] = {
    "flashinfer.decode": (flashinfer_decode, flashinfer_decode_graph, flashinfer_trtllm),
    "flashinfer.prefill": (flashinfer_prefill, flashinfer_ragged),
    "flashinfer.attention": (flashinfer_sinks,),
    "flashinfer.mla": (flashinfer_mla, flashinfer_trtllm_mla),
    "flashinfer.page": (flashinfer_states,),
}
_ELSEWHERE = {
    "trtllm_batch_context_with_kv_cache": "flashinfer.prefill",
    "trtllm_ragged_attention_deepseek": "flashinfer.prefill",
    "merge_state": "flashinfer.cascade",
    "merge_state_in_place": "flashinfer.cascade",
    "merge_states": "flashinfer.cascade",
}
_BELOW_THE_TOP = frozenset(
    {
        "MLAPlanMetadata",
        "trtllm_batch_context_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache_mla",
        "trtllm_ragged_attention_deepseek",
        "xqa_batch_decode_with_kv_cache",
    }
)
"""Names that `import flashinfer` doesn't show."""


def modules() -> Mapping[str, ModuleType]:
    """Fresh modules of the library, as `import flashinfer` leaves them."""
    host_reads.clear()
    tree: dict[str, dict[str, Any]] = {"flashinfer": {"__version__": VERSION}}
    tree["flashinfer.jit"] = {"Kernel": flashinfer_decode_launch.Kernel}  # what modules are built of
    for home, sources in _HOMES.items():
        tree.setdefault(home, {})
        for source in sources:
            for name in source.__all__:
                tree.setdefault(_ELSEWHERE.get(name, home), {})[name] = getattr(source, name)
                if name not in _BELOW_THE_TOP:
                    tree["flashinfer"][name] = getattr(source, name)
    return module_tree(tree)
