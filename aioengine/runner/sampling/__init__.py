"""Sampling of token ids from logits, on a CPU and on a GPU."""
