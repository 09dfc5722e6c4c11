"""Encodes and decodes frames, in msgpack.

Each direction of each channel has its own encoder or decoder. Decoding is strict and has a size limit: bytes that are
not a complete frame of this protocol raise BadFrameError. Receivers drop such frames and continue.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache
from typing import get_args

import msgspec

from aioengine.protocol.messages import Frame, Message, NewEpoch
from aioengine.protocol.times import shift_times

MAX_FRAME_BYTES = 256 * 1024 * 1024

_NUM_HEAD_BYTES = 24
"""Bytes of a bad frame that its error shows."""
_SENDER_BITS = 62


class BadFrameError(ValueError):
    """The bytes are not a frame of this protocol."""


class LostFrameError(RuntimeError):
    """A frame of a sender is missing. Its content is unknown, so the channel is broken."""


class FrameTooLargeError(ValueError):
    """The messages of one frame exceed the size limit of the receiver."""


class UnencodableError(ValueError):
    """A message has a value that cannot be encoded. Nothing of the frame is sent."""


class FrameEncoder:
    """Encodes frames of one epoch."""

    def __init__(
        self, epoch: int, *, max_bytes_of_several: int | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        """max_bytes_of_several: limit for a frame of several messages; None: as for a single message. clock: gives
        ``Frame.sent_at``; None: the receiver is on this machine.
        """
        self._max_bytes_of_several = max_bytes_of_several
        self._clock = clock
        self._encoder = msgspec.msgpack.Encoder()
        self.begin(epoch)

    def begin(self, epoch: int) -> None:
        """Start a new epoch, as a new sender."""
        self._epoch = epoch
        self._sender = secrets.randbits(_SENDER_BITS)
        self._number = 0

    def encode(self, messages: list[Message]) -> bytes:
        """Return the frame of ``messages``.

        Raises:
            FrameTooLargeError: the frame exceeds the limit.
            UnencodableError: one of the messages cannot be encoded.
        """
        sent_at = None if self._clock is None else self._clock()
        try:
            frame = self._encoder.encode(Frame(self._epoch, self._sender, self._number, messages, sent_at))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise UnencodableError(f"{type(error).__name__}: {error}") from error
        limit = MAX_FRAME_BYTES if len(messages) == 1 else self._max_bytes_of_several or MAX_FRAME_BYTES
        if len(frame) > limit:
            raise FrameTooLargeError(f"{len(messages)} messages take {len(frame):,} bytes, the limit is {limit:,}")
        self._number += 1
        return frame


class FrameDecoder:
    """Decodes frames. Frames of other epochs are dropped.

    Channels keep the order of frames. So if a number of a sender is missing, a frame could not be decoded, or a
    connection to another machine lost it.
    """

    def __init__(self, epoch: int, clock: Callable[[], float]) -> None:
        """clock: the clock of this machine, to which the times in frames of other machines are converted."""
        self._epoch = epoch
        self._decoder = msgspec.msgpack.Decoder(Frame, strict=True)
        self._next_numbers: dict[int, int] = {}
        self._clock = clock

    def begin(self, epoch: int) -> None:
        """Start a new epoch: accept only its frames."""
        self._epoch = epoch
        self._next_numbers.clear()

    def decode(self, data: bytes | bytearray | memoryview) -> list[Message]:
        """Return the messages of a frame; [] for a frame of another epoch.

        Raises:
            BadFrameError: wrong content.
            LostFrameError: an earlier frame of its sender is missing or damaged.
        """
        try:
            frame = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            head = bytes(data[:_NUM_HEAD_BYTES]).hex(" ") or "-"
            text = f"not a frame of this protocol ({error}); {len(data)} bytes, beginning with {head}"
            raise BadFrameError(text) from error
        if frame.epoch != self._epoch:
            return []
        expected = self._next_numbers.get(frame.sender, 0)
        if frame.number != expected:
            raise LostFrameError(f"frame {expected} of a sender is missing, but frame {frame.number} has arrived")
        self._next_numbers[frame.sender] = expected + 1
        if frame.sent_at is not None:
            shift_times(frame.messages, self._clock() - frame.sent_at)
        return frame.messages


def new_epoch_in(messages: Iterable[Message]) -> NewEpoch | None:
    """Return the message that starts a new epoch. Messages in the same list belong to the old epoch."""
    for message in messages:
        if isinstance(message, NewEpoch):
            return message
    return None


@cache
def fingerprint() -> str:
    """Return a hash of the names, types, tags and order of the fields of all Structs.

    If two processes have different hashes, they run different code and cannot decode each other's arrays.
    """
    lines: dict[str, str] = {}
    _describe(Frame, lines)
    text = "\n".join(lines[name] for name in sorted(lines))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _describe(kind: object, lines: dict[str, str]) -> None:
    """Add a line for ``kind`` and for every Struct and enumeration that it refers to."""
    for argument in get_args(kind):
        _describe(argument, lines)
    if not isinstance(kind, type) or kind.__name__ in lines:
        return
    if issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        described = [f"{field.encode_name}:{field.type}:{field.required}" for field in fields]
        lines[kind.__name__] = f"{kind.__name__} {kind.__struct_config__.tag} {' '.join(described)}"
        for field in fields:
            _describe(field.type, lines)
    elif issubclass(kind, Enum):
        lines[kind.__name__] = f"{kind.__name__} {[(member.name, member.value) for member in kind]}"
