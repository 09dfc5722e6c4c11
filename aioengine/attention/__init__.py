"""Attention over the paged KV pool, one backend a file."""
