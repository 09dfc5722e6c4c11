"""Tokenizes the texts of ``encode`` and the pairs of texts of ``rerank``: adds their prompt, and truncates them.

Only the beginning of a long text is tokenized: enough for more tokens than the limit of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from aioengine.errors import RequestError, RequestTooLargeError, describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioengine.frontend.intake.prompts import PooledPrompt
    from aioengine.protocol.messages import PairIds
    from aioengine.settings.config import PoolingSettings
    from aioengine.tokenization.tokenizer import Tokenizer

MARGIN: Final = 512
"""A cut text has this many tokens more than ``max_tokens``, because its tokens near the cut are wrong."""

CHARACTERS_PER_TOKEN: Final = 8
GROWTH: Final = 4


class PoolEncoder(NamedTuple):
    """Tokenizes texts of up to ``max_tokens`` tokens. On the tokenizer's threads.

    ``in_text``: as in ``Encoder``.
    """

    tokenizer: Tokenizer
    settings: PoolingSettings
    max_tokens: int
    in_text: Callable[[str], str] = str

    def encode(self, prompts: list[PooledPrompt]) -> list[PairIds | ValueError | RequestError]:
        """Return the ids of each prompt, or its error."""
        try:
            pairs = [self._texts(prompt) for prompt in prompts]
            encoded = self.tokenizer.encode_pairs(pairs)
            return [self._fitting(prompt, pair, ids) for prompt, pair, ids in zip(prompts, pairs, encoded, strict=True)]
        except BaseException as error:  # a wrong prompt fails alone, also if compiled code panics
            if len(prompts) == 1:
                return [RequestError("tokenize", describe(error))]
            return [self.encode([prompt])[0] for prompt in prompts]

    def _texts(self, prompt: PooledPrompt) -> tuple[str, str | None]:
        """Return the first text after its prompt, and the second text. Long texts are cut."""
        settings, name = self.settings, prompt.options.prompt_name
        before = settings.prompts.get(settings.default_prompt if name is None else name, "")
        first = self.in_text(before + prompt.first.text)
        second = None if prompt.second is None else prompt.second.text
        if settings.lowers_text:
            first, second = first.lower(), None if second is None else second.lower()
        return self._beginning(first), None if second is None else self._beginning(second)

    def _beginning(self, text: str) -> str:
        """Return the beginning of a text, with more tokens than the limit."""
        wanted = self.max_tokens + MARGIN
        length = CHARACTERS_PER_TOKEN * wanted
        while length < len(text):
            [ids] = self.tokenizer.encode_batch([text[:length]], add_special_tokens=False)
            if len(ids) >= wanted:
                return text[:length]
            length *= GROWTH
        return text

    def _fitting(self, prompt: PooledPrompt, pair: tuple[str, str | None], ids: PairIds) -> PairIds | ValueError:
        """Return the ids. If there are too many, truncate the text, or return the error."""
        if len(ids) <= self.max_tokens:
            return ids
        if prompt.options.truncates:
            return self.tokenizer.encode_cut(*pair, self.max_tokens)
        kind = "text" if prompt.second is None else "pair of texts"
        return RequestTooLargeError(
            f"the {kind} has at least {len(ids)} tokens, and {self.max_tokens} fit; truncate=True cuts its end"
        )
