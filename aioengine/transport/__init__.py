"""Channels that move frames between processes."""
