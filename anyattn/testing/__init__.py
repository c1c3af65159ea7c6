"""The judge: oracle, cases, checks."""
