"""What machine this is and which libraries it has, without importing torch or creating a device context."""

from __future__ import annotations

from anyattn.detect.host import detect_host
from anyattn.detect.known import KNOWN
from anyattn.detect.library import Library
from anyattn.detect.machine import detect_machine
from anyattn.detect.plugins import PluginReport, Plugins, PluginState, discover, plugins
from anyattn.detect.probe import Outcome, ProbeReport, kept_probes, probe, probe_all, with_probes
from anyattn.detect.simulate import simulate
from anyattn.detect.simulated import HOSTS
from anyattn.detect.sources import Sources

__all__ = [
    "HOSTS",
    "KNOWN",
    "Library",
    "Outcome",
    "PluginReport",
    "PluginState",
    "Plugins",
    "ProbeReport",
    "Sources",
    "detect_host",
    "detect_machine",
    "discover",
    "kept_probes",
    "plugins",
    "probe",
    "probe_all",
    "simulate",
    "with_probes",
]
