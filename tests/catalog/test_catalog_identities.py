"""A removed capability row needs a stated reason."""

from __future__ import annotations

from dataclasses import replace

from row_identities import PATH, Ledger, identity, problems, read, write

from anyattn.catalog import records
from anyattn.core.capabilities import Proof

NOW = tuple(identity(record, row) for record in records() for row in record.rows)


def test_identities_are_unique() -> None:
    assert len(set(NOW)) == len(NOW)


def test_catalog_agrees_with_the_file() -> None:
    found = problems(NOW, read(PATH.read_text(encoding="utf-8")))
    assert not found, "run python tests/catalog/update_rows.py\n" + "\n".join(found)


def test_a_lost_row_is_reported() -> None:
    assert problems(("a",), Ledger(("a", "b"), {})) == ["lost without a reason: b"]


def test_a_lost_row_with_a_reason_is_fine() -> None:
    assert problems(("a",), Ledger(("a",), {"b": "the wheel has no such code"})) == []


def test_an_empty_reason_is_none() -> None:
    assert problems(("a",), Ledger(("a",), {"b": ""})) == ["removed without a reason: b"]


def test_a_new_row_and_one_that_came_back_are_reported() -> None:
    found = problems(("a", "b", "c"), Ledger(("a", "b"), {"b": "gone"}))
    assert found == ["not on file: c", "stands in the catalog again: b"]


def test_the_file_round_trips() -> None:
    ledger = Ledger(("a | b", "c | d"), {"e | f": "measured wrong", "g": "vendor withdrew it"})
    assert read(write(ledger)) == ledger


def test_a_weaker_promise_is_another_row_and_a_better_proof_is_not() -> None:
    record = records()[0]
    row = record.rows[0]
    assert identity(record, replace(row, features=row.features[1:])) != identity(record, row)
    assert identity(record, replace(row, degraded="slow")) != identity(record, row)
    assert identity(record, replace(row, proof=Proof.HARDWARE, source="run")) == identity(record, row)
