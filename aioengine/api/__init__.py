"""The public API: the engines, their arguments and their results."""
