"""The main functions of the child processes. ``supervision`` starts them by name and never imports them."""
