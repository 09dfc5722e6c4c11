"""Policies order the waiting requests. One file per policy; the file name is its name. See ``Policy`` in ``_base``."""
