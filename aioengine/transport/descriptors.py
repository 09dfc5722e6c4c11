"""The file descriptors 0, 1 and 2 belong to the standard streams, also in a process that was started without them."""

from __future__ import annotations

import os


def hold_standard_descriptors() -> None:
    """Put the null device where standard input, output or error is closed. It stays there; nothing else changes.

    Otherwise the next socket that anybody opens gets that number: event loops abort on closing it, whoever writes to
    the standard stream writes into it, and a child takes it for its own.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)  # as standard streams are
    os.close(fd)
