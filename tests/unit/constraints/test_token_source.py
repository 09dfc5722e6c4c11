"""Token ids of forced text: from the tokenizer, or from the longest tokens if the tokenizer changes the text."""

from __future__ import annotations

from aioengine.constraints.token_source import SPECIAL, TokenSource, token_bytes

TOKENS = [b"", b"a", b"b", b"ab", b"abb", token_bytes("ab", is_special=True), token_bytes(b"\xc3", is_special=False)]


def source_of(ids: list[int]) -> TokenSource:
    return TokenSource(TOKENS, {5}, [5], lambda _: ids)


def test_special_tokens_are_marked() -> None:
    assert TOKENS[5:] == [SPECIAL + b"ab", b"\xc3"]


def test_text_that_the_tokenizer_does_not_change_is_tokenized_by_it() -> None:
    assert source_of([1, 2, 3])("abab") == [1, 2, 3]


def test_text_that_the_tokenizer_changes_is_tokenized_by_the_longest_tokens() -> None:
    for changed in ([], [1], [1, 1], [2, 3], [99]):
        assert source_of(changed)("ababb") == [3, 4]


def test_text_is_tokenized_up_to_a_character_without_a_token() -> None:
    assert source_of([])("abbcab") == [4]
