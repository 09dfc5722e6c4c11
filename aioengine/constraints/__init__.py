"""Checks output constraints and converts them to grammars."""
