"""Checks output constraints, converts them to grammars, and compiles and follows these."""
