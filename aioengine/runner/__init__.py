"""From a plan to tokens: the device side of a step."""
