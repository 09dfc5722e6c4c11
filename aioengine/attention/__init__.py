"""Attention over the paged KV pool. Each file without a leading underscore is a backend."""
