"""Stand-in for wave-lang 3.9.1: the templates of paged decode and extend, compiled kernels, their launches.

From `wave_lang/kernel/wave/templates/{paged_decode_attention,extend_attention}.py`, `compile.py` and
`utils/run_utils.py`. A launch checks nothing: pointers are read as the compiled dtypes whatever they point
at, tensors with gaps are replaced by copies (outputs too: the result is lost). What would be read wrongly
comes out as NaN here. Which shapes compile is known from offline compiles alone (vendor-apis §14.2); others
are `EmulationError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from anyattn.testing.emulators.modules import EmulationError, current_host, module_tree
from anyattn.testing.emulators.wave_kernels import (
    AttentionShape,
    Kernel,
    get_extend_attention_kernel,
    get_paged_decode_attention_kernels,
    get_paged_decode_intermediate_arrays_shapes,
    paged_decode_attention_shape,
)
from anyattn.testing.emulators.wave_types import GenericDot, MMAOperand, MMAType

__all__ = ["WaveCompileOptions", "WaveKernel", "modules", "wave_compile"]

_NAMES = """postprocess canonicalize func_name subs dynamic_symbols schedule use_scheduling_barriers
multi_buffer_count kernel_launch_info kernel_usages backend device target codeobj
iree_preprocessing_pass_pipeline num_devices run_bench benchmark_batch_size benchmark_repetitions
benchmark_results_file capture_trace bench_with_constant_weights profile_python_wrapper
profile_python_cprofile profile_python_warmup profile_python_repetitions kernel_hash create_vmfb_file
override_mlir dump_binaries dump_intermediates compile_to_mlir location_capture_config use_local_scope
use_water_leak_check enforce_locations drop_debug_info_before_mlir optimization_level denorm_fp_math_f32
waves_per_eu wave_runtime iree_launch_async use_buffer_ops use_fast_math use_global_to_shared
linearize_shared_access scalarize_packed_math minimize_shared_allocs reorder_allocs override_schedule
dump_schedule use_bound_check mlir_print_ir_after_all print_ir_after print_ir_before profile_pass
print_trace_begin print_grid print_signature print_mlir print_mlir_file print_pass_times compile_to_asm"""
_OPTIONS = frozenset(_NAMES.split())
_COMPILES = ("gfx90a", "gfx942", "gfx950")


class SchedulingType(Enum):
    """How a loop is scheduled."""

    NONE = 0x00
    PREFETCH = 0x10
    MODULO = 0x11


class WaveCompileOptions:
    """Options by keyword; unknown ones are a `TypeError`, as of the library's dataclass."""

    def __init__(self, **options: Any) -> None:
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise TypeError(
                f"WaveCompileOptions.__init__() got an unexpected keyword argument {unknown[0]!r}"
            )
        self.subs: Mapping[Any, Any] = options.get("subs", {})
        self.dynamic_symbols: list[Any] = options.get("dynamic_symbols", [])
        self.wave_runtime = bool(options.get("wave_runtime", False))
        self.target = str(options.get("target", "gfx942"))
        self.given = options


class WaveKernel:
    """A compiled kernel. Calls take tensors and host ints by position and return assembly text."""

    def __init__(self, options: WaveCompileOptions, kernel: Kernel) -> None:
        self.options, self.asm = options, f"// emulated {kernel.name} for {options.target}"
        self._kernel = kernel

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        """As `invoke`."""
        return self.invoke(*args, **kwargs)

    def invoke(self, *args: Any, **kwargs: Any) -> str:
        """Launch on the current stream.

        Raises:
            IndexError: more tensors than the kernel has. RuntimeError: an illegal access.
        """
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        numbers = [a for a in args if not isinstance(a, torch.Tensor)]
        if len(tensors) > self._kernel.tensors:
            raise IndexError("tuple index out of range")
        if len(tensors) < self._kernel.tensors or len(numbers) != self._kernel.numbers:
            raise RuntimeError(f"{self._kernel.name}: {self._kernel.tensors} tensors, not {len(tensors)}")
        self._kernel.run([t if t.is_contiguous() else t.contiguous() for t in tensors], numbers)
        return self.asm


def wave_compile(options: WaveCompileOptions, kernel: Kernel, schedule: Any = None) -> WaveKernel:
    """The executable kernel.

    Raises:
        RuntimeError: symbols without a value, or a target that nothing is compiled for.
        EmulationError: without `wave_runtime`.
    """
    if not options.wave_runtime:
        raise EmulationError(
            "launches through IREE aren't emulated", asked=False, allowed="wave_runtime=True"
        )
    if options.target not in _COMPILES:
        raise RuntimeError(f"CompilerToolError: iree-compile fails for {options.target}")
    missing = [s for s in kernel.symbols if s not in options.subs]
    if missing:
        raise RuntimeError(f"symbols without a value: {missing}")
    if set(options.dynamic_symbols) != set(kernel.dynamic):
        raise RuntimeError(f"dynamic symbols are {kernel.dynamic}, not {options.dynamic_symbols}")
    return WaveKernel(options, kernel)


def set_default_run_config(options: WaveCompileOptions) -> WaveCompileOptions:
    """For the device that is here."""
    options.target = get_default_arch()
    return options


def get_default_arch() -> str:
    """`gcnArchName` up to the colon."""
    return (current_host() or "rocm:gfx942").partition(":")[2].partition("+")[0].partition("-")[0]


def get_default_scheduling_params() -> dict[Any, Any]:
    """Delays and units, by symbol."""
    return {"READ_SHARED_DELAY": 1, "READ_GLOBAL_DELAY": 2, "MMA_UNITS": 4}


def modules() -> Mapping[str, ModuleType]:
    """Fresh modules. `wave_runtime` is only there to be found."""
    wave = "wave_lang.kernel.wave"
    compiling: dict[str, Callable[..., Any]] = {
        "WaveCompileOptions": WaveCompileOptions, "wave_compile": wave_compile, "WaveKernel": WaveKernel,
    }  # fmt: skip
    return module_tree(
        {
            f"{wave}.compile": compiling,
            f"{wave}.compile_options": {"WaveCompileOptions": WaveCompileOptions},
            f"{wave}.constraints": {"MMAType": MMAType, "GenericDot": GenericDot, "MMAOperand": MMAOperand},
            f"{wave}.scheduling.schedule_enums": {"SchedulingType": SchedulingType},
            f"{wave}.scheduling.schedule": {"SchedulingType": SchedulingType},
            f"{wave}.utils.general_utils": {"get_default_scheduling_params": get_default_scheduling_params},
            f"{wave}.utils.run_utils": {
                "set_default_run_config": set_default_run_config, "get_default_arch": get_default_arch,
            },
            f"{wave}.templates.attention_common": {"AttentionShape": AttentionShape},
            f"{wave}.templates.paged_decode_attention": {
                "get_paged_decode_attention_kernels": get_paged_decode_attention_kernels,
                "get_paged_decode_intermediate_arrays_shapes": get_paged_decode_intermediate_arrays_shapes,
                "paged_decode_attention_shape": paged_decode_attention_shape,
            },
            f"{wave}.templates.extend_attention": {
                "get_extend_attention_kernel": get_extend_attention_kernel, "AttentionShape": AttentionShape,
            },
            "wave_runtime": {"KernelLaunchInfo": SimpleNamespace},
        }
    )  # fmt: skip
