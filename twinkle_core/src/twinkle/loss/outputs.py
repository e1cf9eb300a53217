"""From logits, or from what goes into the output head, to what a loss says that it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import DataError
from twinkle.loss.linear import fits_one_chunk, linear_logps, linear_nll

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinkle.data_format import ModelOutput

__all__ = ['head_outputs', 'outputs_from_hidden', 'outputs_from_logits']


def outputs_from_logits(
    logits_BTV: Tensor, labels_BT: Tensor | None, needs: Iterable[str], *, loss_weights: Tensor | None = None
) -> ModelOutput:
    """`logits`, `logps`, `nll` and `entropies`, whichever `needs` names, from logits that exist already."""
    needs = frozenset(needs)
    outputs: dict[str, Any] = {'logits': logits_BTV} if 'logits' in needs else {}
    wanted = needs & {'logps', 'nll', 'entropies'}
    if wanted:
        labels_BT = _check_labels(labels_BT, logits_BTV)
        logps, entropies = _token_outputs(
            logits_BTV.flatten(0, 1),
            labels_BT.flatten(),
            with_logps=bool(wanted & {'logps', 'nll'}),
            with_entropy='entropies' in wanted,
        )
        outputs.update(_shaped(wanted, logps, entropies, labels_BT, loss_weights))
    return outputs  # type: ignore[return-value]


def outputs_from_hidden(
    hidden_BTH: Tensor,
    head: nn.Linear,
    labels_BT: Tensor | None,
    needs: Iterable[str],
    *,
    loss_weights: Tensor | None = None,
) -> ModelOutput:
    """The same from the input of a linear head, without logits unless `needs` names them; `hidden_states` too."""
    needs = frozenset(needs)
    if 'logits' in needs:
        outputs: dict[str, Any] = dict(
            outputs_from_logits(head(hidden_BTH), labels_BT, needs, loss_weights=loss_weights)
        )
    else:
        outputs = {}
        if needs & {'logps', 'nll', 'entropies'}:
            outputs.update(_from_linear(hidden_BTH, head, _check_labels(labels_BT, hidden_BTH), needs, loss_weights))
    if 'hidden_states' in needs:
        outputs['hidden_states'] = hidden_BTH
    return outputs  # type: ignore[return-value]


def _from_linear(
    hidden_BTH: Tensor, head: nn.Linear, labels_BT: Tensor, needs: frozenset[str], loss_weights: Tensor | None
) -> dict[str, Tensor]:
    hidden_NH, labels_N = hidden_BTH.flatten(0, 1), labels_BT.flatten()
    if fits_one_chunk(len(labels_N), head.weight):
        # A chunk's logits are held anyway: with few tokens PyTorch's own operators are the quicker way to the same numbers.
        logits_NV = nn.functional.linear(hidden_NH, head.weight, head.bias)
        return _from_few(logits_NV, labels_BT, needs, loss_weights)
    if needs & {'logps', 'entropies'}:
        logps, entropies = linear_logps(
            hidden_NH, head.weight, labels_N, bias=head.bias, with_entropy='entropies' in needs
        )
        return _shaped(needs, logps, entropies, labels_BT, loss_weights)
    weights = None if loss_weights is None else loss_weights.flatten()
    return {'nll': linear_nll(hidden_NH, head.weight, labels_N, bias=head.bias, loss_weights_N=weights)}


def _from_few(
    logits_NV: Tensor, labels_BT: Tensor, needs: frozenset[str], loss_weights: Tensor | None
) -> dict[str, Tensor]:
    labels_N = labels_BT.flatten()
    if not needs & {'logps', 'entropies'} and loss_weights is None:
        nll = nn.functional.cross_entropy(logits_NV.float(), labels_N, ignore_index=IGNORE_INDEX, reduction='sum')
        return {'nll': nll}
    logps, entropies = _token_outputs(logits_NV, labels_N, with_logps=True, with_entropy='entropies' in needs)
    return _shaped(needs, logps, entropies, labels_BT, loss_weights)


def head_outputs(
    head: Callable[[Tensor], Tensor],
    hidden_BTH: Tensor,
    labels_BT: Tensor | None,
    needs: Iterable[str],
    *,
    loss_weights: Tensor | None = None,
    chunk_size: int = 256,
) -> ModelOutput:
    """The same for any head at all (with an adapter, soft-capped): a chunk's logits are computed, and again in backward."""
    needs = frozenset(needs)
    outputs: dict[str, Any] = {}
    if needs & {'logps', 'nll', 'entropies'}:
        labels_BT = _check_labels(labels_BT, hidden_BTH)
        logps, entropies = _in_chunks(
            head, hidden_BTH.flatten(0, 1), labels_BT.flatten(), 'entropies' in needs, chunk_size
        )
        outputs.update(_shaped(needs, logps, entropies, labels_BT, loss_weights))
    if 'hidden_states' in needs:
        outputs['hidden_states'] = hidden_BTH
    if 'logits' in needs:
        outputs['logits'] = head(hidden_BTH)
    return outputs  # type: ignore[return-value]


def _in_chunks(
    head: Callable[[Tensor], Tensor], hidden_NH: Tensor, labels_N: Tensor, with_entropy: bool, chunk_size: int
) -> tuple[Tensor, Tensor | None]:
    """[N] log-probabilities and entropies; only tokens with a label go through the head."""

    def chunk(hidden: Tensor, labels: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return _token_outputs(head(hidden), labels, with_logps=True, with_entropy=with_entropy)

    index = (labels_N != IGNORE_INDEX).nonzero().squeeze(1)
    if not len(index):
        # One token, times 0: every parameter of the head then has a gradient, on this rank as on the others.
        index = index.new_zeros(min(1, len(labels_N)))
    parts = [
        checkpoint(chunk, hidden_NH[part], labels_N[part], use_reentrant=False) for part in index.split(chunk_size)
    ]
    zeros = hidden_NH.new_zeros(len(labels_N), dtype=torch.float32)
    logps = zeros.index_copy(0, index, torch.cat([part[0] for part in parts]))
    return logps, zeros.index_copy(0, index, torch.cat([part[1] for part in parts])) if with_entropy else None


def _token_outputs(
    logits_NV: Tensor, labels_N: Tensor, *, with_logps: bool, with_entropy: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Log-probabilities of labels and entropies, [N] in fp32; 0 where a label is -100."""
    kept = labels_N != IGNORE_INDEX
    logps = entropies = None
    if with_logps:
        logps = -torch.nn.functional.cross_entropy(
            logits_NV.float(), labels_N, ignore_index=IGNORE_INDEX, reduction='none'
        )
    if with_entropy:
        log_p = logits_NV.float().log_softmax(-1)
        entropies = torch.where(kept, -(log_p.exp() * log_p).sum(-1), 0.0)
    return logps, entropies


def _shaped(
    needs: frozenset[str],
    logps: Tensor | None,
    entropies: Tensor | None,
    labels_BT: Tensor,
    loss_weights: Tensor | None,
) -> dict[str, Tensor]:
    shaped: dict[str, Tensor] = {}
    if 'logps' in needs and logps is not None:
        shaped['logps'] = logps.view(labels_BT.shape)
    if 'nll' in needs and logps is not None:
        per_token = logps.view(labels_BT.shape)
        shaped['nll'] = -(per_token if loss_weights is None else per_token * loss_weights).sum()
    if 'entropies' in needs and entropies is not None:
        shaped['entropies'] = entropies.view(labels_BT.shape)
    return shaped


def _check_labels(labels_BT: Tensor | None, against: Tensor) -> Tensor:
    if labels_BT is None:
        raise DataError('The inputs have no labels, and what was asked for (nll, logps, entropies) is of labels.')
    if labels_BT.shape != against.shape[:2]:
        raise DataError(
            f'labels have shape {tuple(labels_BT.shape)}, the model gave positions of {tuple(against.shape[:2])}.'
        )
    return labels_BT
