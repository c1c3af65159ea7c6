"""The kit as tests, one for each item: collected by `pytest --pyargs anyattn.testing --backend NAME`."""

from __future__ import annotations

import pytest

from anyattn.testing.checks import Subject
from anyattn.testing.kit import explained_result, reproduction, run_item
from anyattn.testing.plan import Item

__all__ = ["test_item"]


def test_item(kit_item: tuple[Subject, Item]) -> None:
    """Passes, or says why not and how to run it again."""
    subject, item = kit_item
    result = run_item(item, subject)
    if result.skipped is not None:
        pytest.skip(result.skipped)
    if result.why is not None:
        result = explained_result(result, subject)
        pytest.fail(
            f"{result.why}\n{reproduction(result, subject.declared.name, subject.where)}", pytrace=False
        )
