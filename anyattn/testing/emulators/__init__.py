"""Stand-ins for vendor libraries that can't run here: real names and signatures, arithmetic on the CPU.

A stand-in computes in float64 from the real argument conventions (layout, window, base of the log-sum-exp,
axis order, scales), rejects what the library rejects, drops silently what it drops, and answers NaN where the
library would read garbage. It proves the adapter's call, not the library's kernel.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType

from anyattn.errors import UnknownNameError
from anyattn.testing.emulators.modules import EmulationError, current_host, set_host

__all__ = ["EMULATORS", "EmulationError", "Emulator", "current_host", "emulating", "emulator_of", "install"]


@dataclass(frozen=True)
class Emulator:
    """The host that a backend is decided on, and its library's stand-in.

    Attributes:
        host: as in `anyattn.detect.simulate`.
        modules: makes fresh modules, dotted name -> module. Chips are told apart by `current_host()`.
    """

    host: str
    modules: Callable[[], Mapping[str, ModuleType]]


def _from(file: str) -> Mapping[str, ModuleType]:
    """`modules()` of a file of this folder, imported only now."""
    found: Mapping[str, ModuleType] = importlib.import_module(f"{__name__}.{file}").modules()
    return found


EMULATORS: dict[str, Emulator] = {
    "flashinfer": Emulator("cuda:sm90", partial(_from, "flashinfer")),
    "flashinfer_mla": Emulator("cuda:sm90", partial(_from, "flashinfer")),
    "trtllm_mha": Emulator("cuda:sm100", partial(_from, "flashinfer")),
    "trtllm_mla": Emulator("cuda:sm100", partial(_from, "flashinfer")),
    "fa3": Emulator("cuda:sm90-sglang-kernel-vllm", partial(_from, "flash_attention")),
    "fa3_mla": Emulator("cuda:sm90", partial(_from, "flash_attention")),
    "fa4": Emulator("cuda:sm90", partial(_from, "flash_attention_4")),
    "fa4_mla": Emulator("cuda:sm100", partial(_from, "flash_attention_4")),
    "flashmla": Emulator("cuda:sm90", partial(_from, "flash_mla")),
    "cutedsl_mla": Emulator("cuda:sm100", partial(_from, "cutedsl_mla")),
    "hpc_ops": Emulator("cuda:sm90", partial(_from, "hpc_ops")),
    "aiter": Emulator("rocm:gfx942", partial(_from, "aiter")),
    "aiter_mla": Emulator("rocm:gfx942", partial(_from, "aiter")),
    "ascend": Emulator("ascend:910b", partial(_from, "torch_npu")),
    "ascend_mla": Emulator("ascend:910b", partial(_from, "torch_npu")),
    "intel_amx": Emulator("cpu:amx", partial(_from, "vllm_cpu")),
    "wave": Emulator("rocm:gfx942", partial(_from, "wave")),
}
"""By backend name; `NAME_mla` where a name has a second class."""


def emulator_of(name: str, *, latent: bool = False) -> Emulator:
    """The emulator of a backend; of its class for latent models, where there is one apart.

    Raises:
        UnknownNameError: the backend has no emulator.
    """
    key = f"{name}_mla" if latent and f"{name}_mla" in EMULATORS else name
    if key not in EMULATORS:
        raise UnknownNameError("backend with an emulator", name, EMULATORS)
    return EMULATORS[key]


@contextmanager
def emulating(name: str, host: str | None = None) -> Iterator[Emulator]:
    """Fresh stand-ins in `sys.modules` inside the block; afterwards what was there before.

    Args:
        host: another chip than the emulator's own, where the library behaves otherwise.

    Raises:
        UnknownNameError: no such emulator.
    """
    emulator = emulator_of(name)
    before, previous = dict(sys.modules), current_host()
    _put(emulator, host)
    try:
        yield emulator
    finally:
        roots = _roots(emulator)
        for module in [m for m in sys.modules if m.partition(".")[0] in roots]:
            del sys.modules[module]
        sys.modules.update({m: v for m, v in before.items() if m.partition(".")[0] in roots})
        set_host(previous)


def install(name: str, host: str | None = None, *, latent: bool = False) -> Emulator:
    """Stand-ins for the rest of this process: for the kit's workers and commands.

    Raises:
        UnknownNameError: no such emulator.
    """
    emulator = emulator_of(name, latent=latent)
    _put(emulator, host)
    return emulator


def _roots(emulator: Emulator) -> set[str]:
    return {name.partition(".")[0] for name in emulator.modules()}


def _put(emulator: Emulator, host: str | None) -> None:
    set_host(host or emulator.host)
    fresh = emulator.modules()
    roots = {name.partition(".")[0] for name in fresh}
    for module in [m for m in sys.modules if m.partition(".")[0] in roots]:
        del sys.modules[module]
    sys.modules.update(fresh)
