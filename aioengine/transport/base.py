"""The two ends of a one-way channel of frames. ``local`` works inside an event loop, ``zmq`` between processes.

Asynchronous receivers are for event loops (the frontend and the inline launcher). Blocking receivers are for child
processes. A sender sends all messages of one call in order. Only a child that listens waits for its receiver. The
number of unsent frames is bounded, and it is an error if there are more.
"""


class BacklogFullError(RuntimeError):
    """The receiver has stopped reading."""
