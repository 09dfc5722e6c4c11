"""Makes the text stages of requests, from a tokenizer that is read once."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, cast

from aioengine.patterns import PatternCache
from aioengine.text.detokenizer import Decode, make_detokenizer
from aioengine.text.pipeline import TextPipeline
from aioengine.text.stop import StopMatcher
from aioengine.text.token_table import TokenizerFile, TokenTable, read_token_table
from aioengine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from aioengine.protocol.messages import TextRules


class TextSource:
    """The stages of a request's text, by its rules; None in place of them where there is no tokenizer."""

    def __init__(self, tokenizer_path: str | None) -> None:
        """Read the tokenizer in the folder ``tokenizer_path``.

        Raises:
            ValueError: there is none, or its files cannot be read.
        """
        self._tokenizer = None if tokenizer_path is None else Tokenizer(tokenizer_path)
        self._patterns = PatternCache()
        self._sources: dict[bool, TokenTable | Decode] = {}
        if self._tokenizer is not None:
            self._source(self._tokenizer, skip_special_tokens=True)

    def pipeline(self, rules: TextRules) -> TextPipeline | None:
        """The stages of a new request.

        Raises:
            ValueError: a stop of the rules cannot be used.
        """
        if self._tokenizer is None:
            return None
        source = self._source(self._tokenizer, skip_special_tokens=rules.skip_special_tokens)
        stops = None
        if rules.stop or rules.stop_regex:
            stops = StopMatcher(
                rules.stop,
                rules.stop_regex,
                no_stop_trim=rules.no_stop_trim,
                cache=self._patterns,
                clock=time.thread_time,
            )
        return TextPipeline(make_detokenizer(source, rules.context_token_ids), stops)

    def _source(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> TokenTable | Decode:
        """What decodes, with special tokens or without: a table, or the tokenizer where a table is too little."""
        source = self._sources.get(skip_special_tokens)
        if source is None:
            facts = cast("TokenizerFile", tokenizer.decoding_facts())
            table = read_token_table(facts, skip_special_tokens=skip_special_tokens)
            source = table if table is not None else partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
            self._sources[skip_special_tokens] = source
        return source
