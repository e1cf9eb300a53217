"""The shapes of data that travel between dataset, template, processor, model and loss.

Rows are plain dictionaries (so that they live in a `datasets` table or a JSON line); the classes here give them names and
types. Legend for shapes: B rows, T tokens of a row, V vocabulary, H hidden size, K rows that carry an embedding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ['IGNORE_INDEX', 'InputFeature', 'LossOutput', 'Message', 'ModelOutput', 'SamplingParams', 'Trajectory']

IGNORE_INDEX = -100
"""The label of a position that is not trained on (PyTorch's own convention)."""


class Message(TypedDict, total=False):
    """One turn of a conversation, in the chat format of Transformers.

    `role` is 'system', 'user', 'assistant' or 'tool'. `content` is a string, or a list of parts
    (`{'type': 'text', 'text': ...}`, `{'type': 'image', 'image': ...}`). `train=False` keeps an assistant turn out of the loss,
    `weight` scales its tokens there.
    """

    role: str
    content: str | list[dict[str, Any]] | None
    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str
    train: bool
    weight: float


class Trajectory(TypedDict, total=False):
    """One conversation, with what else a row may carry: tool schemas, a reward, an advantage, images."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    rewards: float
    advantages: float
    images: list[Any]
    videos: list[Any]
    audios: list[Any]


class InputFeature(TypedDict, total=False):
    """One encoded row, as lists or 1-D tensors of T integers.

    `labels[t]` is the target of the logits at position t: the template has already shifted them by one. Positions that are
    not trained on hold -100.
    """

    input_ids: list[int]
    labels: list[int]
    attention_mask: list[int]
    position_ids: list[int]
    loss_weights: list[float]
    length: int


class ModelOutput(TypedDict, total=False):
    """What a forward pass gives back. Only what was asked for is present.

    Shapes: `logits` [B, T, V]; `logps` [B, T], log-probability of `labels[t]` and 0 where it is -100; `nll` a scalar, the
    sum of `-logps` (times `loss_weights` where given); `entropies` [B, T]; `hidden_states` [B, T, H]; `embeddings` [K, H];
    `values` [B, T]; `aux_loss` a scalar, the router's auxiliary loss; `loss` the mean over counted tokens as a float.
    """

    logits: Tensor
    logps: Tensor
    nll: Tensor
    entropies: Tensor
    embeddings: Tensor
    values: Tensor
    hidden_states: Tensor
    aux_loss: Tensor
    loss: float
    num_tokens: float


@dataclass(frozen=True)
class LossOutput:
    """What a loss returns: a sum and what it counts, never a mean.

    Attributes:
        loss_sum: scalar tensor that carries the gradient.
        count: number of tokens (or pairs, or rows) in the sum; 0 when there was nothing to learn from.
        metrics: further sums for a loss's own metric, each additive over micro-batches and ranks.
    """

    loss_sum: Tensor
    count: Tensor | float
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingParams:
    """How to sample from a model, in the terms that generation libraries share.

    Raises:
        ConfigError: for a value outside its range.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    num_samples: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        from twinkle.errors import ConfigError

        rules = {
            'max_tokens': (self.max_tokens >= 1, 'at least 1'),
            'temperature': (self.temperature >= 0, 'at least 0 (0 is greedy)'),
            'top_p': (0 < self.top_p <= 1, 'above 0 and at most 1'),
            'top_k': (self.top_k == -1 or self.top_k >= 1, '-1 (off) or at least 1'),
            'repetition_penalty': (self.repetition_penalty > 0, 'above 0'),
            'num_samples': (self.num_samples >= 1, 'at least 1'),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ConfigError(f'SamplingParams: {name}={getattr(self, name)!r} must be {rule}.')
