"""Backend records and capability rows, one data file a platform. No torch."""
