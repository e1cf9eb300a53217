"""From tokens and what is trained of them to `InputFeature`s: the shift of labels, and truncation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from twinkle.data_format import IGNORE_INDEX, InputFeature
from twinkle.errors import DataError
from twinkle.template.truncation import windows

__all__ = ['Tokens', 'build_features', 'cut_feature']


@dataclass(frozen=True)
class Tokens:
    """An encoded row before truncation.

    Attributes:
        ids: T tokens.
        trained: for each token, whether the model is to learn to say it.
        weights: for each token its weight in the loss, or None where the row gives none.
    """

    ids: list[int]
    trained: list[bool]
    weights: list[float] | None = None


def build_features(
    tokens: Tokens, extras: Mapping[str, Any], max_length: int | None, truncation: str
) -> list[InputFeature]:
    """One feature per kept part of the row, `extras` in each.

    Raises:
        DataError: nothing of the row is trained on; it says whether truncation took it.
        SampleTooLongError: too long, under 'raise'.
    """
    length = len(tokens.ids)
    parts = windows(length, max_length, truncation)
    features = [_feature(tokens, part, extras) for part in parts]
    kept = [feature for feature in features if any(label != IGNORE_INDEX for label in feature['labels'])]
    if parts and not kept:
        raise DataError(_why_nothing_is_left(tokens, max_length, truncation))
    return kept


def _feature(tokens: Tokens, part: slice, extras: Mapping[str, Any]) -> InputFeature:
    ids, trained = tokens.ids[part], tokens.trained[part]
    labels = [token if learn else IGNORE_INDEX for token, learn in zip(ids[1:], trained[1:], strict=True)]
    labels.append(IGNORE_INDEX)
    feature: dict[str, Any] = {
        **extras,
        'input_ids': ids,
        'labels': labels,
        'attention_mask': [1] * len(ids),
        'length': len(ids),
    }
    if tokens.weights is not None:
        shifted = [*tokens.weights[part][1:], 0.0]
        feature['loss_weights'] = [
            weight if label != IGNORE_INDEX else 0.0 for weight, label in zip(shifted, labels, strict=True)
        ]
    return cast(InputFeature, feature)


def _why_nothing_is_left(tokens: Tokens, max_length: int | None, truncation: str) -> str:
    length = len(tokens.ids)
    if max_length is not None and length > max_length:
        first = tokens.trained.index(True) if True in tokens.trained else length
        return (
            f'Truncation leaves nothing to train on: the row has {length} tokens, of which the first {first} are '
            f'prompt, and max_length={max_length} with truncation={truncation!r} keeps none of the rest. Raise '
            'max_length, or choose truncation="left" (keeps the end) or "delete" (drops long rows).'
        )
    return (
        f'Nothing of the row is trained on: of its {length} tokens, none that follows another is said by the assistant.'
    )


def cut_feature(row: Mapping[str, Any], max_length: int | None, truncation: str) -> list[InputFeature]:
    """A row that is encoded already: a copy, or its parts where it is too long (labels are taken as shifted).

    Every sequence of numbers that is as long as `input_ids` is cut with it.

    Raises:
        DataError: no tokens, labels of another length, or nothing left to train on after truncation.
        SampleTooLongError: too long, under 'raise'.
    """
    length = _length(row['input_ids'])
    labels = row.get('labels')
    if length == 0:
        raise DataError('The row has empty input_ids; filter such rows out.')
    if labels is not None and _length(labels) != length:
        raise DataError(f'The row has {length} input_ids and {_length(labels)} labels; they must be as many.')
    parts = windows(length, max_length, truncation)
    if parts == [slice(0, length)]:
        return [cast(InputFeature, {**row, 'length': length})]
    kept = []
    for part in parts:
        feature = {key: value[part] if _per_token(value, length) else value for key, value in row.items()}
        feature['length'] = part.stop - part.start
        if labels is not None:
            cut = feature['labels'].tolist() if hasattr(feature['labels'], 'tolist') else list(feature['labels'])
            cut[-1] = IGNORE_INDEX
            feature['labels'] = cut
            if all(label == IGNORE_INDEX for label in cut):
                continue
        kept.append(cast(InputFeature, feature))
    if parts and not kept:
        raise DataError(
            f'Truncation leaves nothing to train on: the row has {length} tokens, and max_length={max_length} with '
            f'truncation={truncation!r} keeps only positions whose label is {IGNORE_INDEX}. Raise max_length.'
        )
    return kept


def _length(value: Any) -> int:
    try:
        return len(value)
    except TypeError as error:
        raise DataError(f'input_ids and labels of a row must be sequences, not {type(value).__name__}.') from error


def _per_token(value: Any, length: int) -> bool:
    if hasattr(value, 'shape'):
        return len(value.shape) > 0 and value.shape[0] == length
    return (
        isinstance(value, Sequence)
        and not isinstance(value, (str, bytes))
        and len(value) == length
        and isinstance(value[0], (int, float))
    )
