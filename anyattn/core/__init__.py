"""Contract, compiler, selection and graph logic: torch and the standard library only."""
