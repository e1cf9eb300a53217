"""Cross entropy and log-probabilities of a linear head, a chunk of tokens at a time.

The logits of a batch, [N, V], are never held, forward or backward: a chunk's logits are made, used and dropped. Two roads:

* `linear_cross_entropy` knows its gradient up to a scalar already in forward (softmax minus one-hot), and makes it there: no logits
  are computed twice.
* `linear_logps` serves losses that weight each token by something known only later. With a frozen weight the Jacobian of a
  token's log-probability is one row of H numbers and is made in forward; with a trainable one, chunks are computed again in backward.

Shapes: N tokens (rows and positions flattened), H hidden, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ['fits_one_chunk', 'linear_cross_entropy', 'linear_logps', 'linear_nll']

CHUNK_BYTES = 48 * 2**20
"""About how much memory the fp32 logits of one chunk may take."""


def linear_cross_entropy(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    *,
    bias: Tensor | None = None,
    loss_weights_N: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The summed negative log-likelihood of `labels_N`, and each token's log-probability.

    Args:
        hidden_NH: input of the head. Under autocast it and the weight are cast as `torch.nn.functional.linear` would.
        weight_VH, bias: the head; frozen or trainable.
        labels_N: targets; positions that hold -100 count nothing and cost nothing.
        loss_weights_N: multiplies each token's term.
        chunk_size: tokens per chunk; by default as many as fit a budget of memory.

    Returns:
        A scalar in fp32 that carries the gradient, and [N] log-probabilities without one (0 where ignored).
    """
    index = (labels_N != IGNORE_INDEX).nonzero().squeeze(1)
    nll, logps = _kept_nll(hidden_NH, weight_VH, labels_N, bias, loss_weights_N, index, chunk_size)
    return nll, logps.new_zeros(labels_N.shape).index_copy(0, index, logps)


def linear_nll(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    *,
    bias: Tensor | None = None,
    loss_weights_N: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """The sum of `linear_cross_entropy` alone."""
    index = (labels_N != IGNORE_INDEX).nonzero().squeeze(1)
    return _kept_nll(hidden_NH, weight_VH, labels_N, bias, loss_weights_N, index, chunk_size)[0]


def _kept_nll(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    loss_weights: Tensor | None,
    index: Tensor,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """Over the tokens of `index`: the sum, and each log-probability."""
    hidden, weight, bias = _autocast(hidden, weight, bias)
    weights = None if loss_weights is None else loss_weights[index].float()
    nll: Tensor
    logps: Tensor
    nll, logps = _LinearNll.apply(
        hidden[index], weight, bias, labels[index], weights, chunk_size or _chunk_size(weight)
    )
    return nll, logps


def linear_logps(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of `labels_N`, [N] in fp32, and if asked the entropy of each token's distribution; both differentiable.

    Positions that hold -100 give 0 for both. `temperature` divides the logits first.
    """
    hidden_NH, weight_VH, bias = _autocast(hidden_NH, weight_VH, bias)
    index = (labels_N != IGNORE_INDEX).nonzero().squeeze(1)
    chunk_size = chunk_size or _chunk_size(weight_VH)
    logps, entropies = _LinearLogps.apply(
        hidden_NH[index], weight_VH, bias, labels_N[index], temperature, with_entropy, chunk_size
    )
    zeros = logps.new_zeros(labels_N.shape)
    return zeros.index_copy(0, index, logps), zeros.index_copy(0, index, entropies) if with_entropy else None


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return hidden, weight, bias


def fits_one_chunk(tokens: int, weight_VH: Tensor) -> bool:
    """Whether the logits of so many tokens are within what a chunk may take."""
    return tokens <= _chunk_size(weight_VH)


def _chunk_size(weight: Tensor) -> int:
    return max(1, CHUNK_BYTES // (4 * weight.shape[0]))


def _chunks(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[C, V] in fp32, computed as the head would in its own dtype."""
    return torch.nn.functional.linear(hidden, weight, bias).float()


class _Gradients:
    """Sums up the gradients of hidden, weight and bias over chunks; the weight's in fp32 whatever its dtype."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        self.hidden = torch.zeros_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needed[2] else None

    def add(self, part: slice, d_logits: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """`d_logits` [C, V] in fp32, of the tokens in `part`."""
        low = d_logits.to(weight.dtype)
        if self.hidden is not None:
            torch.mm(low, weight, out=self.hidden[part])
        if self.weight is not None:
            if weight.dtype is torch.float32:
                self.weight.addmm_(low.t(), hidden[part])
            else:
                self.weight.add_(low.t() @ hidden[part])
        if self.bias is not None:
            self.bias.add_(d_logits.sum(0))

    def release(self, factor: Tensor | None, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        """All of them, times a scalar if there is one, in the dtypes of what they are gradients of.

        They are let go of here: autograd then takes them over as they are, where it would copy what somebody else still holds.
        """
        gradients = (self.hidden, self.weight, self.bias)
        self.hidden = self.weight = self.bias = None
        if factor is not None:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor.to(gradient.dtype))
        hidden, d_weight, d_bias = gradients
        return (
            hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None or bias is None else d_bias.to(bias.dtype),
        )


class _LinearNll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        needed = ctx.needs_input_grad
        gradients = _Gradients(hidden, weight, bias, needed)
        logps = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        for part in _chunks(len(labels), chunk):
            logits = _logits(hidden[part], weight, bias)
            target = labels[part].unsqueeze(1)
            lse = logits.logsumexp(1, keepdim=True)
            logps[part] = (logits.gather(1, target) - lse).squeeze(1)
            if any(needed[:3]):
                d_logits = logits.sub_(lse).exp_()
                d_logits.scatter_add_(1, target, torch.full_like(lse, -1.0))
                if weights is not None:
                    d_logits.mul_(weights[part].unsqueeze(1))
                gradients.add(part, d_logits, hidden, weight)
        ctx.gradients, ctx.weight, ctx.bias = gradients, weight, bias
        ctx.mark_non_differentiable(logps)
        return -(logps if weights is None else logps * weights).sum(), logps

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_nll: Tensor, _: Any) -> tuple[Any, ...]:
        gradients = ctx.gradients
        if gradients is None:
            raise StateError(
                'Backward through this cross entropy a second time: its gradients were made in forward and are gone. Run forward again.'
            )
        ctx.gradients = None
        return (*gradients.release(d_nll, ctx.weight, ctx.bias), None, None, None)


class _LinearLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        with_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        needed = ctx.needs_input_grad
        # With only the hidden states' gradient to make, a token's Jacobian is a row of H: no need to compute its logits again.
        ahead = needed[0] and not needed[1] and not (bias is not None and needed[2])
        logps = torch.zeros(len(labels), dtype=torch.float32, device=hidden.device)
        entropies = torch.zeros_like(logps)
        d_logps = torch.empty_like(hidden) if ahead else None
        d_entropies = torch.empty_like(hidden) if ahead and with_entropy else None
        for part in _chunks(len(labels), chunk):
            log_p, target = _log_p(hidden[part], weight, bias, labels[part], temperature)
            logps[part] = log_p.gather(1, target).squeeze(1)
            if not (ahead or with_entropy):
                continue
            p = log_p.exp()
            if with_entropy:
                entropies[part] = -(p * log_p).sum(1)
            if d_entropies is not None:
                d = _d_entropy(p, log_p, entropies[part]).div_(temperature)
                torch.mm(d.to(weight.dtype), weight, out=d_entropies[part])
            if d_logps is not None:
                d = p.neg_().scatter_add_(1, target, torch.ones_like(p[:, :1])).div_(temperature)
                torch.mm(d.to(weight.dtype), weight, out=d_logps[part])
        ctx.ahead, ctx.temperature, ctx.with_entropy, ctx.chunk = ahead, temperature, with_entropy, chunk
        if ahead:
            ctx.save_for_backward(d_logps, d_entropies)
        else:
            ctx.save_for_backward(hidden, weight, bias, labels)
        if not with_entropy:
            ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logps: Tensor, g_entropies: Tensor) -> tuple[Any, ...]:
        if ctx.ahead:
            d_logps, d_entropies = ctx.saved_tensors
            d_hidden = d_logps * g_logps.unsqueeze(1).to(d_logps.dtype)
            if d_entropies is not None:
                d_hidden.addcmul_(d_entropies, g_entropies.unsqueeze(1).to(d_entropies.dtype))
            return (d_hidden, *[None] * 6)
        hidden, weight, bias, labels = ctx.saved_tensors
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
        for part in _chunks(len(labels), ctx.chunk):
            log_p, target = _log_p(hidden[part], weight, bias, labels[part], ctx.temperature)
            p = log_p.exp()
            g = g_logps[part].unsqueeze(1)
            if ctx.with_entropy:
                entropy = -(p * log_p).sum(1)
                d_logits = _d_entropy(p, log_p, entropy).mul_(g_entropies[part].unsqueeze(1)).addcmul_(p, g, value=-1)
            else:
                d_logits = p.mul_(-g)
            d_logits.scatter_add_(1, target, g).div_(ctx.temperature)
            gradients.add(part, d_logits, hidden, weight)
        return (*gradients.release(None, weight, bias), None, None, None, None)


def _log_p(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities over the vocabulary, [C, V], and the labels as an index, [C, 1]."""
    logits = _logits(hidden, weight, bias)
    if temperature != 1.0:
        logits.div_(temperature)
    return logits.sub_(logits.logsumexp(1, keepdim=True)), labels.unsqueeze(1)


def _d_entropy(p: Tensor, log_p: Tensor, entropy: Tensor) -> Tensor:
    """Derivative of each row's entropy by its logits: -p (log p + entropy)."""
    return (log_p + entropy.unsqueeze(1)).mul_(p).neg_()
