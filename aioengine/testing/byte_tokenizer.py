"""A byte tokenizer in a model folder of the package.

Ids 0 to 255 are the bytes of UTF-8; the special tokens follow. It encodes every text, and an id may be a part of a
character.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

BYTE_MODEL: Final = Path(__file__).with_name("byte_model")
NUM_BYTES: Final = 256
EOS_TOKEN_ID: Final = 256
VOCAB_SIZE: Final = 261
