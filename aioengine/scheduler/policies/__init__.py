"""Policies: in which order waiting requests are asked in. One file each, by name; see ``Policy`` in ``_base``."""
