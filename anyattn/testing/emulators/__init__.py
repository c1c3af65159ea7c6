"""Stand-ins for libraries that cannot run here."""
