"""The catalog: what every backend can do, as data. No torch, no vendor library is imported here.

Conventions of the rows:
- A row that serves DRAFT belongs to a backend that serves PREFILL and DECODE on the same chip: a draft
  model runs all its steps on one backend.
- `source` names the section of the reference, the file of a library's release or the public thread that a
  row was written from. A fact that nobody could show is left out, and `source` says so.
- `proof` is what was run here, not what the vendor says.
"""

from __future__ import annotations

from anyattn.catalog import ascend, cuda, intel, linear, portable, reference, rocm, sparse
from anyattn.core.capabilities import BackendRecord

__all__ = ["records"]

_RECORDS = (
    *cuda.RECORDS,
    *rocm.RECORDS,
    *ascend.RECORDS,
    *intel.RECORDS,
    *portable.RECORDS,
    *reference.RECORDS,
    *sparse.RECORDS,
    *linear.RECORDS,
)


def records() -> tuple[BackendRecord, ...]:
    """All built-in records. Their order is the last resort of ranking: vendors, portable, reference."""
    return _RECORDS
