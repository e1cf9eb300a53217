"""Rewards by rule: the form of a completion, its answer, its length."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from twinkle.errors import ConfigError, DataError
from twinkle.reward.base import Reward, check_pairs

__all__ = ['AnswerReward', 'FormatReward', 'LengthReward']

_THINK_THEN_ANSWER = (
    r'(?:<think>)?(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>'
)
_ANSWER = re.compile(r'<answer>((?:(?!<answer>).)*?)</answer>', re.DOTALL)
_DIGITS = r'(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?![\d.]))?|\.\d+'
_NUMBER = re.compile(rf'(?<![\w.])(?:(?<!\d)[-+\u2212])?\$?(?:{_DIGITS})(?:/\d+(?:\.\d+)?(?![\d/]))?')


class FormatReward(Reward):
    """1 where a completion as a whole matches a regular expression, white space around it aside, else 0.

    By default: `</think>` behind reasoning (the prompt may have opened `<think>`, so it may lack), then `<answer>...</answer>`, each
    tag once.

    Args:
        pattern: the regular expression; `.` matches line ends too.

    Raises:
        ConfigError: `pattern` is none.
    """

    def __init__(self, pattern: str = _THINK_THEN_ANSWER) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            raise ConfigError(f'FormatReward: pattern={pattern!r} is no regular expression: {error}.') from error

    def __call__(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """1.0 or 0.0 for each completion; rows are not looked at."""
        check_pairs('FormatReward', completions, rows)
        return [float(self.pattern.fullmatch(completion.strip()) is not None) for completion in completions]


class AnswerReward(Reward):
    """1 where a completion's answer is that of its row, else 0.

    The answer is what the last `<answer>...</answer>` holds; without that it is the last number, or, if the row's answer is no number,
    the whole completion behind `</think>`. Numbers are compared as numbers (`1,234`, `$5`, `3/4`, `1e3`, `50%` as 50), other texts
    without regard to case and white space. Of a row's answer that ends in `#### 72`, as GSM8K's do, the 72 counts.

    Args:
        key: where rows have the answer.
        tolerance: how far numbers may be apart, relative to the row's.

    Raises:
        ConfigError: a negative `tolerance`.
        DataError: a row without an answer.
    """

    def __init__(self, key: str = 'answer', *, tolerance: float = 1e-6) -> None:
        if not tolerance >= 0:
            raise ConfigError(f'AnswerReward: tolerance={tolerance!r} must be at least 0.')
        self.key, self.tolerance = key, tolerance

    def __call__(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """1.0 or 0.0 for each completion."""
        check_pairs('AnswerReward', completions, rows)
        return [
            float(self._is_right(c, self._wanted(row, i)))
            for i, (c, row) in enumerate(zip(completions, rows, strict=True))
        ]

    def _wanted(self, row: Mapping[str, Any], index: int) -> str:
        answer = row.get(self.key)
        if answer is None or isinstance(answer, (bool, list, dict)) or not str(answer).strip():
            raise DataError(
                f'AnswerReward: row {index} has {self.key}={answer!r}; it must be a text or a number (keys: {sorted(row)}).'
            )
        return str(answer).rpartition('####')[2].strip()

    def _is_right(self, completion: str, wanted: str) -> bool:
        number = _number(wanted)
        tagged = _ANSWER.findall(completion)
        if tagged:
            said = tagged[-1]
        elif number is not None:
            found = _NUMBER.findall(completion)
            if not found:
                return False
            said = found[-1]
        else:
            said = completion.rpartition('</think>')[2]
        said_number = _number(said)
        if number is None or said_number is None:
            return _plain(said) == _plain(wanted)
        return abs(said_number - number) <= abs(number) * Fraction(self.tolerance)


def _number(text: str) -> Fraction | None:
    """The number that `text` is, or None if it is anything more or less than one."""
    text = text.strip().rstrip('.').removesuffix('%').strip()
    if len(text) > 200 or not _NUMBER.fullmatch(text):
        return None
    above, _, below = text.replace('$', '').replace(',', '').replace('\u2212', '-').partition('/')
    try:
        return Fraction(above) / Fraction(below or 1)
    except ZeroDivisionError:
        return None


def _plain(text: str) -> str:
    return ' '.join(text.casefold().split())


class LengthReward(Reward):
    """A soft penalty for overlong completions: 0 up to `max_length - cache` tokens, from there evenly down to -1 at `max_length`.

    Source: Yu et al., DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2025 (arXiv 2503.14476), eq. 13.

    Args:
        max_length: L_max, in tokens.
        cache: L_cache, the tokens before `max_length` over which the penalty grows.
        tokenizer: counts the tokens of a completion. Without one, rows carry `completion_ids`.

    Raises:
        ConfigError: lengths that are not 0 < cache <= max_length.
        DataError: neither a tokenizer nor `completion_ids`.
    """

    def __init__(self, max_length: int, cache: int, *, tokenizer: Any = None) -> None:
        if not 0 < cache <= max_length or math.isinf(max_length):
            raise ConfigError(
                f'LengthReward: max_length={max_length!r} and cache={cache!r} must be 0 < cache <= max_length.'
            )
        self.max_length, self.cache, self.tokenizer = max_length, cache, tokenizer

    def __call__(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """From 0.0 down to -1.0 for each completion."""
        check_pairs('LengthReward', completions, rows)
        lengths = [self._length(c, row, i) for i, (c, row) in enumerate(zip(completions, rows, strict=True))]
        free = self.max_length - self.cache
        return [0.0 if length <= free else max(-1.0, (free - length) / self.cache) for length in lengths]

    def _length(self, completion: str, row: Mapping[str, Any], index: int) -> int:
        if self.tokenizer is not None:
            return len(self.tokenizer.encode(completion, add_special_tokens=False))
        if row.get('completion_ids') is None:
            raise DataError(f'LengthReward: row {index} has no completion_ids. Add them, or pass a tokenizer.')
        return len(row['completion_ids'])
