"""Cross entropy and log-probabilities of a linear head, a chunk of tokens at a time.

The logits of a batch, [N, V], are never held, forward or backward: a chunk's logits are made, used and dropped. Two roads:

* `linear_cross_entropy` knows its gradient up to a scalar already in forward (softmax minus one-hot), and makes it there: no logits
  are computed twice.
* `linear_logps` serves losses that weight each token by something known only later. With a frozen weight the Jacobian of a
  token's log-probability is one row of H numbers and is made in forward; with a trainable one, chunks are computed again in backward.

Shapes: N tokens (rows and positions flattened), H hidden, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import StateError

__all__ = ['fits_one_chunk', 'linear_cross_entropy', 'linear_logps', 'linear_nll']

CHUNK_BYTES = 128 * 2**20
"""About how much memory the logits of one chunk may take, in fp32; more where the weight itself is large."""

FEW_BYTES = 48 * 2**20
"""Logits that take no more than this in fp32 are not cut into chunks at all."""


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
        A scalar in fp32 (fp64 for a head in it) that carries the gradient, and [N] log-probabilities without one (0 where ignored).
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
    weights = None if loss_weights is None else loss_weights[index]
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
    if not torch.is_autocast_enabled(device) or weight.dtype is torch.float64:  # which autocast leaves alone
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def fits_one_chunk(tokens: int, weight_VH: Tensor) -> bool:
    """Whether the logits of so many tokens are few enough for PyTorch's own operators, which hold them several times."""
    return tokens <= _chunk_size(weight_VH) and 4 * tokens * weight_VH.shape[0] <= FEW_BYTES


def _chunk_size(weight: Tensor) -> int:
    # Every chunk reads and writes the whole gradient of the weight: with chunks that do not grow with it, that would take the time.
    budget = max(CHUNK_BYTES, weight.numel() * weight.element_size() // 4)
    return max(1, budget // (4 * weight.shape[0]))


class _Softmax:
    """The distributions of one chunk of tokens after another, all made in the same memory.

    Fresh memory for every chunk would cost as much as a fifth of the matrix product. Gradients by the logits are written over what they
    are made of: ask for each once.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk: int,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> None:
        self.hidden, self.weight, self.bias, self.labels = hidden, weight, bias, labels
        self.temperature, self.with_entropy = temperature, with_entropy
        # In fp32 at least, whatever the dtype of the matrix product.
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        shape = (min(chunk, len(labels)), weight.shape[0])
        self._product = hidden.new_empty(shape, dtype=weight.dtype)
        self._wide = self._product if weight.dtype is self.dtype else hidden.new_empty(shape, dtype=self.dtype)
        self._second = hidden.new_empty(shape, dtype=self.dtype) if with_entropy else None
        self.parts = [slice(start, min(start + chunk, len(labels))) for start in range(0, len(labels), chunk)]

    def __call__(self, part: slice) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the labels of a part, [C], and entropies."""
        logits = self._logits(part)
        logits.sub_(logits.amax(1, keepdim=True))
        self._target = self.labels[part].unsqueeze(1)
        chosen = logits.gather(1, self._target)
        self._p = logits.exp_() if self._second is None else torch.exp(logits, out=self._second[: len(logits)])
        self._total = self._p.sum(1, keepdim=True)
        log_total = self._total.log()
        logps = (chosen - log_total).squeeze(1)
        if self._second is None:
            return logps, None
        self._weighted = logits.mul_(self._p)
        self._mean = self._weighted.sum(1, keepdim=True).div_(self._total)
        return logps, (log_total - self._mean).squeeze(1)

    def _logits(self, part: slice) -> Tensor:
        product = self._product[: part.stop - part.start]
        # Operators that write to memory given are left alone by autocast; inputs have been cast before.
        if self.bias is None:
            torch.mm(self.hidden[part], self.weight.t(), out=product)
        else:
            torch.addmm(self.bias, self.hidden[part], self.weight.t(), out=product)
        logits = product if self._wide is self._product else self._wide[: len(product)].copy_(product)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def d_logps(self, factor_C1: Tensor) -> Tensor:
        """Derivative of `sum factor logp` of the last part by its logits, [C, V]: factor (one-hot - p)."""
        factor_C1 = factor_C1.to(self.dtype) / self.temperature
        return self._p.mul_(-factor_C1 / self._total).scatter_add_(1, self._target, factor_C1)

    def d_entropies(self, factor_C1: Tensor) -> Tensor:
        """Derivative of `sum factor entropy` of the last part by its logits: factor p (mean log p - log p). Ask before `d_logps`."""
        factor_C1 = factor_C1.to(self.dtype) / self.temperature / self._total
        return self._weighted.mul_(-factor_C1).addcmul_(self._p, factor_C1 * self._mean)

    def narrow(self, d_logits: Tensor) -> Tensor:
        """`d_logits` in the dtype of the matrix product."""
        return d_logits if self._wide is self._product else self._product[: len(d_logits)].copy_(d_logits)


class _Gradients:
    """Sums up the gradients of hidden, weight and bias over chunks; the last two in fp32 whatever their dtype."""

    def __init__(self, softmax: _Softmax, needed: tuple[bool, ...]) -> None:
        hidden, weight, bias, dtype = softmax.hidden, softmax.weight, softmax.bias, softmax.dtype
        self._narrow = weight.dtype
        self._hidden = torch.empty_like(hidden) if needed[0] else None
        self._weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        self._bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None
        self._product = torch.empty_like(weight) if needed[1] and weight.dtype is not dtype else None

    def add(self, softmax: _Softmax, part: slice, d_logits: Tensor) -> None:
        """Those of a part, from the derivative by its logits."""
        if self._bias is not None:
            self._bias.add_(d_logits.sum(0))
        d_logits = softmax.narrow(d_logits)
        if self._hidden is not None:
            torch.mm(d_logits, softmax.weight, out=self._hidden[part])
        if self._weight is None:
            return
        if self._product is None:
            self._weight.addmm_(d_logits.t(), softmax.hidden[part])
        else:
            self._weight.add_(torch.mm(d_logits.t(), softmax.hidden[part], out=self._product))

    def release(self, factor: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """All of them, times a scalar if there is one, in the dtypes of what they are gradients of.

        They are let go of here: autograd then takes them over as they are, where it would copy what somebody else still holds.
        """
        gradients = (self._hidden, self._weight, self._bias)
        self._hidden = self._weight = self._bias = self._product = None
        if factor is not None:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor.to(gradient.dtype))
        return tuple(None if gradient is None else gradient.to(self._narrow) for gradient in gradients)


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
        softmax = _Softmax(hidden, weight, bias, labels, chunk)
        gradients = _Gradients(softmax, ctx.needs_input_grad)
        factor = labels.new_full((len(labels), 1), -1, dtype=softmax.dtype)
        if weights is not None:
            factor = factor * weights.unsqueeze(1)
        logps = factor.new_zeros(len(labels))
        for part in softmax.parts:
            logps[part], _ = softmax(part)
            if any(ctx.needs_input_grad[:3]):
                gradients.add(softmax, part, softmax.d_logps(factor[part]))
        ctx.gradients = gradients
        ctx.mark_non_differentiable(logps)
        return (logps * factor.squeeze(1)).sum(), logps

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_nll: Tensor, _: Any) -> tuple[Any, ...]:
        gradients = ctx.gradients
        if gradients is None:
            raise StateError(
                'Backward through this cross entropy a second time: its gradients were made in forward and are gone. Run forward again.'
            )
        ctx.gradients = None
        return (*gradients.release(d_nll), None, None, None)


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
        softmax = _Softmax(hidden, weight, bias, labels, chunk, temperature, with_entropy)
        logps = labels.new_zeros(len(labels), dtype=softmax.dtype)
        entropies = torch.zeros_like(logps)
        d_logps = torch.empty_like(hidden) if ahead else None
        d_entropies = torch.empty_like(hidden) if ahead and with_entropy else None
        for part in softmax.parts:
            logps[part], entropy = softmax(part)
            ones = torch.ones_like(logps[part]).unsqueeze(1)
            if entropy is not None:
                entropies[part] = entropy
            if d_entropies is not None:
                torch.mm(softmax.narrow(softmax.d_entropies(ones)), weight, out=d_entropies[part])
            if d_logps is not None:
                torch.mm(softmax.narrow(softmax.d_logps(ones)), weight, out=d_logps[part])
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
        softmax = _Softmax(hidden, weight, bias, labels, ctx.chunk, ctx.temperature, ctx.with_entropy)
        gradients = _Gradients(softmax, ctx.needs_input_grad)
        for part in softmax.parts:
            softmax(part)
            by_entropy = softmax.d_entropies(g_entropies[part].unsqueeze(1)) if ctx.with_entropy else None
            d_logits = softmax.d_logps(g_logps[part].unsqueeze(1))
            gradients.add(softmax, part, d_logits if by_entropy is None else d_logits.add_(by_entropy))
        return (*gradients.release(), None, None, None, None)
