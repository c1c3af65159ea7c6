"""Times measured on a device, by shape: what selection and routing are ranked by."""

from anyattn.core.measure.bucket import Bucket, Role, Shape, Workload, power_of_two
from anyattn.core.measure.table import MeasuredTable, Origin, Provenance, Timing, load_table, merge_tables

__all__ = ["Bucket", "MeasuredTable", "Origin", "Provenance", "Role", "Shape", "Timing", "Workload",
           "load_table", "merge_tables", "power_of_two"]  # fmt: skip
