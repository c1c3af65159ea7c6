"""Opens a backend for verification: on this host, in Triton's interpreter on a CPU, or emulated."""

from __future__ import annotations

from anyattn import api
from anyattn.testing.checks import Subject
from anyattn.testing.declared import declared
from anyattn.testing.emulators import emulator_of, install

__all__ = ["default_device", "needs_interpreter", "open_subject"]


def default_device() -> str:
    """The accelerator that this torch can drive, else the CPU."""
    platform = api.host_facts().platform
    return platform if api.plugin_host(platform) else api.device_type(platform)


def needs_interpreter(backend: str, device: str) -> bool:
    """Our own Triton kernels on a CPU: only Triton's interpreter runs them there."""
    record = api.registry().get(backend)
    served = any(row.serves(api.host_facts(device).target) for row in record.rows)
    return device == "cpu" and record.name == "triton" and not served


def open_subject(
    backend: str, device: str, *, emulated: bool = False, host: str | None = None
) -> Subject:  # fmt: skip
    """The backend on this host; `triton` on a CPU in a process that has TRITON_INTERPRET=1.

    Args:
        emulated: with stand-ins for its library, in this process from now on, decided for the host of
            its emulator or for `host`; `device` is where tensors lie.
        device: torch's, or the name of a plugin's platform whose tensors lie on another type of device.

    Raises:
        UnknownNameError, SelectionError, ConfigError: as `declared`, `offer_triton` and `install`.
    """
    plugged = api.plugin_host(device)
    if plugged is not None:
        facts = declared(backend, None, plugged, emulated=False)
        return Subject(facts, api.device_type(facts.facts.platform), plugged, device)
    if emulated:
        name = api.registry().get(backend).name
        host = host or emulator_of(name).host
        install(name, host)
        return Subject(declared(backend, device, host), device, host)
    if needs_interpreter(backend, device):
        from anyattn.testing.interpreter import offer_triton

        offer_triton()
    return Subject(declared(backend, device), device)
