"""pytest's side of the kit: `pytest --pyargs anyattn.testing --backend NAME [--device D] [--kit-full]`.

Loaded through the entry point `pytest11`; imports nothing of the package until its tests are collected.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["pytest_addoption", "pytest_configure", "pytest_generate_tests"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the kit."""
    group = parser.getgroup("anyattn", "conformance of attention backends (pytest --pyargs anyattn.testing)")
    group.addoption("--backend", metavar="NAME", help="backend that anyattn.testing judges")
    group.addoption(
        "--device", metavar="DEVICE", help="torch device (default: the accelerator, else the CPU)"
    )
    group.addoption("--emulated", action="store_true", help="a stand-in for the backend's library")
    group.addoption("--kit-full", action="store_true", help="shapes of real models, thousands of cases")
    group.addoption("--kit-seed", type=int, default=0, metavar="N", help="of the drawn cases (default: 0)")


def pytest_configure(config: pytest.Config) -> None:
    """Triton's interpreter must be asked for before Triton is imported."""
    backend = config.getoption("--backend", None)
    if backend is None or "triton" in sys.modules or config.getoption("--emulated"):
        return
    from anyattn.testing.subject import default_device, needs_interpreter

    if needs_interpreter(backend, config.getoption("--device") or default_device()):
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each item of the kit's plan, skipped ones included."""
    if "kit_item" not in metafunc.fixturenames:
        return
    backend = metafunc.config.getoption("--backend")
    if backend is None:
        metafunc.parametrize("kit_item", [])
        return
    import pytest

    from anyattn.testing.plan import plan_kit
    from anyattn.testing.subject import default_device, open_subject

    emulated = metafunc.config.getoption("--emulated")
    device = metafunc.config.getoption("--device") or ("cpu" if emulated else default_device())
    subject = open_subject(backend, device, emulated=emulated)
    full, seed = metafunc.config.getoption("--kit-full"), metafunc.config.getoption("--kit-seed")
    plan = plan_kit(subject.declared, full=full, seed=seed)
    items = [pytest.param((subject, item), id=f"{item.label()}-{i}") for i, item in enumerate(plan.items)]
    items += [
        pytest.param((subject, item), id=f"{item.label()}-left-out-{i}", marks=pytest.mark.skip(reason=why))
        for i, (item, why) in enumerate(plan.skipped)
    ]
    metafunc.parametrize("kit_item", items)
