"""Puts this folder on the path: cases here are shared by tests in the interpreter and on a device."""
