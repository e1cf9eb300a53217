"""What becomes of a row that is longer than `max_length`."""

from __future__ import annotations

from twinkle.errors import ConfigError, SampleTooLongError

__all__ = ['TRUNCATIONS', 'check_truncation', 'windows']

TRUNCATIONS = ('raise', 'left', 'right', 'delete', 'split')


def check_truncation(truncation: str, max_length: int | None) -> None:
    """Refuse a strategy or a length that cannot work.

    Raises:
        ConfigError: an unknown strategy, one without `max_length`, or a `max_length` below 2 (one token has no target).
    """
    if truncation not in TRUNCATIONS:
        raise ConfigError(f'truncation={truncation!r}; it must be one of {", ".join(map(repr, TRUNCATIONS))}.')
    if max_length is None:
        if truncation != 'raise':
            raise ConfigError(f'truncation={truncation!r} needs max_length: give the longest row allowed, in tokens.')
    elif isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 2:
        raise ConfigError(f'max_length={max_length!r}; it must be a whole number of at least 2 tokens, or None.')


def windows(length: int, max_length: int | None, truncation: str) -> list[slice]:
    """The parts of a row of `length` tokens that are kept: usually one, none under 'delete', several under 'split'.

    Raises:
        SampleTooLongError: too long, under 'raise'.
    """
    if max_length is None or length <= max_length:
        return [slice(0, length)]
    if truncation == 'delete':
        return []
    if truncation == 'left':
        return [slice(length - max_length, length)]
    if truncation == 'right':
        return [slice(0, max_length)]
    if truncation == 'split':
        return [slice(start, min(start + max_length, length)) for start in range(0, length, max_length)]
    raise SampleTooLongError(
        f'The row has {length} tokens, more than max_length={max_length}. Raise max_length, or choose '
        'truncation="left", "right", "split", or "delete".'
    )
