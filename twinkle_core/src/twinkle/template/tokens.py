"""From characters to tokens: which tokens of a text lie in which span."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ['tokenize_spans', 'tokens_in_spans']


def tokenize_spans(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The tokens of `text`, and for each the number of the span that it belongs to (-1: none).

    A token that lies only partly in a span (merged across the border of prompt and answer) belongs to it: it holds
    something that is said. The spans are in order and apart. No special tokens are added: a chat template writes its
    own.
    """
    if getattr(tokenizer, 'is_fast', False):
        encoded = tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return encoded['input_ids'], tokens_in_spans(encoded['offset_mapping'], spans)
    return _by_prefixes(tokenizer, text, spans)


def tokens_in_spans(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """For each token, given where it stands in the text, the number of the span that it overlaps, or -1."""
    owners = [-1] * len(offsets)
    if not spans:
        return owners
    number, reached = 0, 0
    start, end = spans[0]
    for index, (first, last) in enumerate(offsets):
        if first == last:
            # Tokenizers that trim white space from offsets leave nothing of a token of white space: it stands where
            # the one before it ended.
            first, last = reached, reached + 1
        else:
            reached = last
        while first >= end:
            number += 1
            if number == len(spans):
                return owners
            start, end = spans[number]
        if last > start:
            owners[index] = number
    return owners


def _by_prefixes(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The same without offsets: a token lies behind a border if it is not among the tokens of the text before it."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    owners = [-1] * len(ids)
    for number, (start, end) in enumerate(spans):
        first = _common(tokenizer.encode(text[:start], add_special_tokens=False), ids) if start else 0
        prefix = tokenizer.encode(text[:end], add_special_tokens=False)
        last = _common(prefix, ids)
        for index in range(first, last if last == len(prefix) else min(last + 1, len(ids))):
            owners[index] = number
    return ids, owners


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
