"""Page ids and the prefix cache. Pure Python: the tensors are in the runner."""
