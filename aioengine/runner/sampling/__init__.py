"""From logits to token ids, on the CPU and on a GPU."""
