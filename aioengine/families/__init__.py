"""Readers of config.json, one file for each ``model_type``: ``PLUGIN`` turns it into a ``DecoderConfig``."""
