"""One adapter a file."""
