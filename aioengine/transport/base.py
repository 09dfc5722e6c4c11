"""The two ends of a one-way channel of frames. ``local`` works inside an event loop, ``zmq`` between processes.

Asynchronous ends are for event loops (the frontend and the inline launcher). Blocking ends are for child processes. A
sender sends all messages of one call in order, and never waits for its receiver. Its backlog is bounded, and a full
backlog is an error.
"""


class BacklogFullError(RuntimeError):
    """The receiver has stopped reading."""
