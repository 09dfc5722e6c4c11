"""The main functions of the child processes. ``supervision`` and ``media.intake`` start them by name."""
