"""What to do about a library that is missing, overwritten or broken, in one line."""

from __future__ import annotations

from anyattn.core.facts import HostFacts, LibraryFacts
from anyattn.detect.child import Attempt, Outcome
from anyattn.detect.known import KNOWN
from anyattn.detect.library import Library

__all__ = ["remedy_for"]


def remedy_for(library: Library, facts: LibraryFacts, result: Attempt, host: HostFacts) -> str:
    """The next step for `library` after an attempt that didn't end in USABLE."""
    if result.outcome is Outcome.TORCH:
        return _torch(result)
    if result.outcome is Outcome.TIMEOUT:
        return "give it more time (--timeout SECONDS), or look at what it waits for"
    if result.outcome is Outcome.NOT_STARTED:
        return "allow this process to start another, then probe again"
    missing = (result.missing or "").partition(".")[0]
    if missing and missing != library.modules[0].partition(".")[0]:
        return _provider(missing)
    if ".so" in result.detail and "cannot open shared object" in result.detail:
        return _shared_object(library, result, host)
    return _reinstall(library, facts)


def _torch(result: Attempt) -> str:
    if "torch_npu" in result.detail or "backend extension" in result.detail:
        return "install CANN and source its set_env.sh, or pip uninstall torch-npu"
    return "pip install --force-reinstall torch, then look for a folder that shadows it on PYTHONPATH"


def _provider(module: str) -> str:
    """How to get a module that a library needs."""
    for known in KNOWN.values():
        if module in (name.partition(".")[0] for name in known.modules):
            return known.remedy
    return f"pip install {module.replace('_', '-')}"


def _shared_object(library: Library, result: Attempt, host: HostFacts) -> str:
    if host.platform not in library.platforms:
        return f"nothing to do here: it is for {' and '.join(library.platforms)}, this is {host.target}"
    name = next((word for word in result.detail.replace(":", " ").split() if ".so" in word), "a library")
    return f"{name} isn't found: {library.remedy} for torch {host.torch} ({host.torch_build})"


def _reinstall(library: Library, facts: LibraryFacts) -> str:
    if library.install[:1].isupper():
        return library.install
    if library.torch:
        return library.remedy
    pinned = f"{library.distribution}=={facts.version}" if facts.version else library.distribution
    return f"pip install --force-reinstall --no-deps {pinned}"
