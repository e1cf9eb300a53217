"""Contrastive learning of embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from twinkle.data_format import LossOutput
from twinkle.errors import ConfigError, DataError
from twinkle.loss.base import Loss
from twinkle.loss.gather import data_group, gather_rows

if TYPE_CHECKING:
    from twinkle.data_format import ModelOutput
    from twinkle.device_mesh import DeviceMesh

__all__ = ['InfonceLoss']


class InfonceLoss(Loss):
    """`-log exp(s(q, d+) / tau) / sum_d exp(s(q, d) / tau)` over queries, s the cosine. Counts queries.

    Rows come in groups of a query, its document, and `hard_negatives` further documents. The sum runs over all documents of the batch
    (`in_batch=True`), of all data ranks, or of the group only. `sample_weights`, one per row (of which the query's counts) or per query,
    in the batch or as a keyword, multiply the terms of queries, which then count by weight.

    Args:
        temperature: tau.
        hard_negatives: documents per group beside the positive one.
        in_batch: other groups' documents are negatives too.
        across_ranks: so are those of other data ranks. Every rank then must run the loss as often as every other, in evaluation too.
        device_mesh: which ranks are data ranks; by default as `twinkle.initialize` was told, else all.
        false_negative_margin: leave out negatives whose similarity exceeds the positive's by more than this.
        query_query, document_document: also push the query away from other queries, and its document from other documents.

    Source: van den Oord et al., Representation Learning with Contrastive Predictive Coding, 2018.

    Raises:
        ConfigError: an option outside of its range.
        DataError: rows that do not fill groups.
    """

    requires = frozenset({'embeddings'})
    needs_labels = False

    def __init__(
        self,
        temperature: float = 0.05,
        *,
        hard_negatives: int = 0,
        in_batch: bool = True,
        across_ranks: bool = True,
        device_mesh: DeviceMesh | None = None,
        false_negative_margin: float | None = None,
        query_query: bool = False,
        document_document: bool = False,
    ) -> None:
        if not temperature > 0 or hard_negatives < 0:
            raise ConfigError(
                f'InfonceLoss: temperature={temperature!r} must be above 0 and hard_negatives={hard_negatives!r} at least 0.'
            )
        if not in_batch and (not hard_negatives or query_query or document_document):
            raise ConfigError(
                'InfonceLoss: without in-batch negatives it needs hard_negatives, and no query or document blocks.'
            )
        self.temperature, self.hard_negatives, self.in_batch = temperature, hard_negatives, in_batch
        self.across_ranks, self.device_mesh = across_ranks, device_mesh
        self.false_negative_margin = false_negative_margin
        self.query_query, self.document_document = query_query, document_document

    def __call__(self, inputs: Mapping[str, Any], outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        embeddings = F.normalize(outputs['embeddings'].float(), dim=-1)
        group = 2 + self.hard_negatives
        if len(embeddings) % group:
            raise DataError(
                f'InfonceLoss: {len(embeddings)} rows do not fill groups of {group} (a query, its document, {self.hard_negatives} hard '
                'negatives).'
            )
        grouped = embeddings.view(-1, group, embeddings.shape[-1])
        queries, documents = grouped[:, 0], grouped[:, 1:]
        scores, target = self._scores(queries, documents)
        positive = scores.gather(1, target.unsqueeze(1))
        if self.false_negative_margin is not None:
            too_close = scores > positive + self.false_negative_margin
            too_close = too_close.scatter(1, target.unsqueeze(1), False)  # the positive itself stays
            scores = scores.masked_fill(too_close, float('-inf'))
        losses = F.cross_entropy(scores / self.temperature, target, reduction='none')
        weights = _weights({**inputs, **kwargs}.get('sample_weights'), losses, group)
        with torch.no_grad():
            sums: dict[str, Tensor | float] = {
                'positive': positive.sum(),
                'hits': (scores.argmax(1) == target).sum(),
                'queries': float(len(queries)),
            }
        return LossOutput(loss_sum=(losses * weights).sum(), count=weights.sum(), metrics=sums)

    def _scores(self, queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Similarities [Q, ...] and the column of each query's own document."""
        n, per_query = documents.shape[:2]
        if not self.in_batch:
            return torch.einsum('qh,qdh->qd', queries, documents), torch.zeros(
                n, dtype=torch.long, device=queries.device
            )
        group = data_group(self.device_mesh) if self.across_ranks else None
        everyone, start = gather_rows(documents, group)
        place = torch.arange(start, start + n, device=queries.device)
        blocks = [queries @ everyone.flatten(0, 1).t()]
        itself = place.unsqueeze(1) == torch.arange(len(everyone), device=queries.device)
        if self.query_query:
            blocks.append((queries @ gather_rows(queries, group)[0].t()).masked_fill(itself, float('-inf')))
        if self.document_document:
            blocks.append((documents[:, 0] @ everyone[:, 0].t()).masked_fill(itself, float('-inf')))
        return torch.cat(blocks, dim=1), place * per_query


def _weights(given: Any, losses: Tensor, group: int) -> Tensor:
    if given is None:
        return torch.ones_like(losses)
    weights = torch.as_tensor(given, device=losses.device, dtype=losses.dtype)
    if weights.shape == (len(losses) * group,):
        weights = weights[::group]
    if weights.shape != losses.shape:
        raise DataError(
            f'sample_weights has shape {tuple(weights.shape)}, and there are {len(losses)} queries in {len(losses) * group} rows: give '
            'one per query or per row.'
        )
    return weights
