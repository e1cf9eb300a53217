"""What a loss needs, computed where the output head would have made logits.

A causal language model ends in `logits = head(hidden_states)`, [B, T, V]: for a vocabulary of 150,000 by far its largest tensor.
`OutputHead` stands in for the head during a forward pass and computes log-probabilities from its input, a chunk at a time,
inside the module's own forward. Models that change their logits after the head (soft-capping, scaling) are found by a probe of
two tokens: the change is applied per chunk where it is known, and full logits are made where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twinkle.logging import get_logger
from twinkle.loss.outputs import head_outputs, outputs_from_hidden, outputs_from_logits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from twinkle.data_format import ModelOutput

__all__ = ['OutputHead']

logger = get_logger('twinkle_hf')

Run = Callable[[], Any]
Change = Callable[[Tensor], Tensor]

# Needs that are made from the head's input or output; anything else must come from the module itself.
_FROM_HEAD = frozenset({'logits', 'logps', 'nll', 'entropies', 'hidden_states'})


class OutputHead:
    """The output head of one Transformers module."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._probed = False
        self._change: Change | None = None
        self._opaque = False

    def run(self, run: Run, batch: Mapping[str, Any], needs: frozenset[str]) -> ModelOutput:
        """Call `run` (the module's forward on `batch`) so that it computes `needs`, and no logits unless they are needed."""
        head = self._module.get_output_embeddings() if hasattr(self._module, 'get_output_embeddings') else None
        if head is None or not needs & _FROM_HEAD:
            return self._collect(run(), {})
        labels, weights = batch.get('labels'), batch.get('loss_weights')
        if 'logits' not in needs:
            self._probe(head)
        if 'logits' in needs or self._opaque:
            return self._with_logits(head, run, labels, needs, weights)
        found: dict[str, Any] = {}
        plain = _is_plain_linear(head) and self._change is None

        def stand_in(hidden_BTH: Tensor) -> Tensor:
            hidden_BTH = (
                hidden_BTH[:, -labels.shape[1] :] if labels is not None else hidden_BTH
            )  # behind virtual tokens
            if plain:
                found.update(outputs_from_hidden(hidden_BTH, head, labels, needs, loss_weights=weights))
            else:
                found.update(head_outputs(self._changed(original), hidden_BTH, labels, needs, loss_weights=weights))
            return hidden_BTH[..., :1].clone()  # in place of the logits; nobody reads it

        with _forward_replaced(head, stand_in) as original:
            output = run()
        return self._collect(output, found)

    def _with_logits(
        self, head: nn.Module, run: Run, labels: Tensor | None, needs: frozenset[str], weights: Tensor | None
    ) -> ModelOutput:
        hidden: list[Tensor] = []
        handle = head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
        try:
            output = run()
        finally:
            handle.remove()
        logits_BTV = output.logits
        if labels is not None:
            logits_BTV = logits_BTV[:, -labels.shape[1] :]
        found: dict[str, Any] = {}
        derived = needs - {'logits', 'hidden_states'}
        if derived and labels is not None:
            found.update(outputs_from_logits(logits_BTV, labels, derived, loss_weights=weights))
        if 'logits' in needs:
            found['logits'] = logits_BTV
        if 'hidden_states' in needs:
            found['hidden_states'] = hidden[0]
        return self._collect(output, found)

    def look(self) -> None:
        """Find out what the module does to its logits, unless that is known; it runs the module on two tokens."""
        head = self._module.get_output_embeddings() if hasattr(self._module, 'get_output_embeddings') else None
        if head is not None:
            self._probe(head)

    def _collect(self, output: Any, found: dict[str, Any]) -> ModelOutput:
        """`found`, and what the module itself returns under the names of `ModelOutput`."""
        aux_loss = getattr(output, 'aux_loss', None)
        if isinstance(aux_loss, Tensor):
            # Transformers returns the router's loss unweighted, and weights it only when it computes the whole loss itself.
            config = self._module.config
            weight = getattr(
                config, 'router_aux_loss_coef', getattr(config.get_text_config(), 'router_aux_loss_coef', None)
            )
            found['aux_loss'] = aux_loss if weight is None else weight * aux_loss
        logits = getattr(output, 'logits', None)
        if not found.keys() - {'aux_loss'} and logits is not None:
            found['logits'] = logits
            if logits.ndim == 3 and logits.shape[-1] == 1:
                found['values'] = logits.squeeze(-1)  # one number per token: a value model
        if 'hidden_states' not in found and getattr(output, 'last_hidden_state', None) is not None:
            found['hidden_states'] = output.last_hidden_state
        return found  # type: ignore[return-value]

    def _changed(self, head_forward: Change) -> Change:
        change = self._change
        return head_forward if change is None else lambda hidden: change(head_forward(hidden))

    def _probe(self, head: nn.Module) -> None:
        """Find out, once, what the module does to its logits after the head: give it made-up ones, and look at what comes out."""
        if self._probed:
            return
        raw: list[Tensor] = []

        def made_up(hidden: Tensor) -> Tensor:
            values = torch.linspace(-30, 30, hidden.shape[1] * self._module.config.get_text_config().vocab_size)
            raw.append(values.view(1, hidden.shape[1], -1).to(hidden))
            return raw[0]

        was_training = self._module.training
        try:
            self._module.eval()  # so that dropout draws nothing from the random state
            device = head_device(self._module)
            # Without autocast, which would keep weights cast here, without a graph, for the forward pass that is to be trained.
            with torch.no_grad(), torch.autocast(device.type, enabled=False), _forward_replaced(head, made_up):
                tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
                logits = self._module(input_ids=tokens, use_cache=False).logits
        finally:
            self._module.train(was_training)
        self._probed = True
        for change in (None, _known_change(self._module.config)):
            if raw and _same(raw[0] if change is None else change(raw[0]), logits):
                self._change = change
                return
        self._opaque = True
        logger.info(
            '%s changes its logits after the head in a way that is not known here: log-probabilities are computed from full logits, '
            'which takes more memory.', type(self._module).__name__,
        )  # fmt: skip


def head_device(module: nn.Module) -> torch.device:
    """The device of the first parameter."""
    return next(module.parameters()).device


def _is_plain_linear(head: nn.Module) -> bool:
    replaced = 'forward' in head.__dict__  # by tensor parallelism, whose heads hold a part of the vocabulary
    return type(head) is nn.Linear and not replaced and not head._forward_hooks and not head._forward_pre_hooks


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-5, atol=1e-6)


def _known_change(config: Any) -> Change | None:
    """Soft-capping (Gemma 2) and scaling (Cohere, Granite) of logits, as their configurations name them."""
    text = config.get_text_config()
    cap = getattr(text, 'final_logit_softcapping', None)
    if cap:
        return lambda logits: torch.tanh(logits / cap) * cap
    if getattr(text, 'logit_scale', None):
        return lambda logits: logits * text.logit_scale
    if getattr(text, 'logits_scaling', None):
        return lambda logits: logits / text.logits_scaling
    return None


@contextmanager
def _forward_replaced(head: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[Change]:
    """`head.forward` is `forward` within the context, and what it was before after it. Yields the original."""
    own = head.__dict__.get('forward')
    original = head.forward
    head.forward = forward  # type: ignore[method-assign]
    try:
        yield original
    finally:
        if own is None:
            del head.forward
        else:
            head.forward = own  # type: ignore[method-assign]
