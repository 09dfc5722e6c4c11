"""Requests that share history, and streams that are read again."""
