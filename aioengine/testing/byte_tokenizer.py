"""A tokenizer of bytes, in a model folder that ships with the package: small, exact, and without a download.

Ids 0 to 255 are the bytes of UTF-8, and the special tokens follow. Every text has an encoding, text and ids can be
checked by eye, and one id can be a part of a character.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

BYTE_MODEL: Final = Path(__file__).with_name("byte_model")
NUM_BYTES: Final = 256
EOS_TOKEN_ID: Final = 256
VOCAB_SIZE: Final = 261
