"""Pages, radix tree, prefix cache, snapshots and adapter slots. Pure Python: the tensors are in the runner."""
