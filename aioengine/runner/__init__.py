"""The device side of a step: compute the rows of a plan and sample tokens."""
