"""What is known of one distribution beforehand, and the normal form of its name."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Library", "normalise"]


def normalise(name: str) -> str:
    """A distribution's name in its normal form (PEP 503): `sgl_kernel` -> `sgl-kernel`."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


@dataclass(frozen=True, kw_only=True)
class Library:
    """One distribution that some backend runs on.

    Attributes:
        distribution: normalised name.
        modules: what it must own (dotted where the top level is shared: `flash_attn.cute`).
        platforms: platforms it has kernels for.
        recorded: the version that the capability rows were written from.
        provides: the purpose in a few words.
        simulated: a simulated host of its platforms has it unless told otherwise.
        install: pip arguments, or a sentence (starting with a capital) where pip can't install it.
        aliases: distributions that ship the same modules under another name, for other builds of torch.
        strangers: unrelated distributions that take the same module name.
        torch: PEP 440 range of torch outside of which it is known to fail.
        needs_torch: importing it imports torch.
        imports: what a probe imports (default: `modules`); `attributes` must then exist in the last.
        machines: instruction sets it is built for; empty = any.
    """

    distribution: str
    modules: tuple[str, ...]
    platforms: tuple[str, ...]
    recorded: str | None
    provides: str
    simulated: bool = True
    install: str = ""
    aliases: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()
    torch: str = ""
    needs_torch: bool = True
    imports: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()

    @property
    def remedy(self) -> str:
        """The line that installs it."""
        if self.install[:1].isupper():
            return self.install
        pinned = f"{self.distribution}=={self.recorded}" if self.recorded else self.distribution
        return f"pip install {self.install or pinned}"

    @property
    def probe_imports(self) -> tuple[str, ...]:
        """Modules that a probe imports, in order."""
        own = self.imports or self.modules
        return ("torch", *own) if self.needs_torch else own
