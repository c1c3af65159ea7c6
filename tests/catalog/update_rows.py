"""Bring `rows.txt` up to date: `python tests/catalog/update_rows.py [--reason "why rows were removed"]`."""

from __future__ import annotations

import argparse
import sys

from row_identities import PATH, Ledger, identity, read, write

from anyattn.catalog import records


def main() -> int:
    """0 after writing; 1 when rows are gone and nobody says why."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reason", default="", help="why the rows that are gone were removed or changed")
    reason = parser.parse_args().reason.strip()
    now = tuple(identity(record, row) for record in records() for row in record.rows)
    old = read(PATH.read_text(encoding="utf-8")) if PATH.exists() else Ledger((), {})
    gone = [row for row in old.rows if row not in now]
    if gone and not reason:
        print("\n".join(gone), "\nThese rows are gone. Say why: --reason '…'", file=sys.stderr)
        return 1
    kept = {row: why for row, why in old.removed.items() if row not in now}
    PATH.write_text(write(Ledger(now, kept | dict.fromkeys(gone, reason))), encoding="utf-8")
    print(f"{len(now)} rows, {len(gone)} newly removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
