"""Test files have names of their own: pytest imports them as top-level modules."""

from collections import Counter
from pathlib import Path


def test_no_two_test_files_share_a_name() -> None:
    counts = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert not [name for name, count in counts.items() if count > 1]
