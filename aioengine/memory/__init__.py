"""Where the past is kept: pages and the prefix cache. Pure bookkeeping; the tensors live in the runner."""
