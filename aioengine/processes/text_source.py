"""Makes the text stages of requests, from a tokenizer folder that is read once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from tokenizers import Tokenizer

from aioengine.text.detokenizer import Decode, make_detokenizer
from aioengine.text.pipeline import TextPipeline
from aioengine.text.stop import StopMatcher
from aioengine.text.token_table import TokenizerFile, TokenTable, read_token_table

if TYPE_CHECKING:
    from aioengine.protocol.messages import TextRules

_FILE_NAME = "tokenizer.json"


class TextSource:
    """The stages of a request's text, by its rules; None in place of them where there is no tokenizer."""

    def __init__(self, tokenizer_path: str | None) -> None:
        """Read ``tokenizer.json`` of the folder ``tokenizer_path``.

        Raises:
            OSError: there is no such file, or it cannot be read.
            ValueError: it does not hold a tokenizer.
        """
        self._file: Path | None = None
        self._sources: dict[bool, TokenTable | Decode] = {}
        if tokenizer_path is not None:
            path = Path(tokenizer_path)
            self._file = path if path.is_file() else path / _FILE_NAME
            self._source(skip_special_tokens=True)

    def pipeline(self, rules: TextRules) -> TextPipeline | None:
        """The stages of a new request.

        Raises:
            ValueError: a stop of the rules cannot be used.
        """
        if self._file is None:
            return None
        source = self._source(skip_special_tokens=rules.skip_special_tokens)
        stops = None
        if rules.stop or rules.stop_regex:
            stops = StopMatcher(rules.stop, rules.stop_regex, no_stop_trim=rules.no_stop_trim)
        return TextPipeline(make_detokenizer(source, rules.context_token_ids), stops)

    def _source(self, *, skip_special_tokens: bool) -> TokenTable | Decode:
        source = self._sources.get(skip_special_tokens)
        if source is None:
            source = self._sources[skip_special_tokens] = self._read(skip_special_tokens=skip_special_tokens)
        return source

    def _read(self, *, skip_special_tokens: bool) -> TokenTable | Decode:
        assert self._file is not None
        data = self._file.read_bytes()
        try:
            table = read_token_table(
                msgspec.json.decode(data, type=TokenizerFile), skip_special_tokens=skip_special_tokens
            )
        except msgspec.DecodeError as error:
            raise ValueError(f"{self._file} is not a tokenizer file: {error}") from error
        if table is not None:
            return table
        decode = Tokenizer.from_buffer(data).decode
        return partial(decode, skip_special_tokens=skip_special_tokens)
