"""`TwinkleModel`: the one interface between a training loop and whatever trains behind it.

A loop is written once against these methods; `TransformersModel`, `MegatronModel` or anybody's own class stands behind them.
`twinkle.model.base.BaseModel` implements all of it on top of a few primitives, so a backend rarely implements this directly.

Conventions that hold for every method:

* `adapter_name` left out means the adapter of the enclosing `with model.adapter(name):`, else the only one there is (the base
  model itself, named `''`, when no adapter was added). With several, the error lists them.
* `inputs` is one `InputFeature`, a list of them, a dictionary of tensors, or trajectories (`{'messages': [...]}`) when a template
  is set. What is passed in is never changed.
* `gradient_accumulation_steps` (g) given in any call of a window governs that window and is remembered. g counts
  `forward_backward` calls. The methods of the step act only at the boundary, that is after micro-batches g, 2g, 3g, ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor, nn

    from twinkle.data_format import InputFeature, ModelOutput, Trajectory

    Inputs = InputFeature | Trajectory | Mapping[str, Any] | Sequence[InputFeature | Trajectory | Mapping[str, Any]]

__all__ = ['TwinkleModel']


class TwinkleModel(ABC):
    """What every backend offers to a training loop."""

    backend: ClassVar[str] = ''
    """The qualifier of this backend's own parts in the registries (`transformers`, `megatron`)."""

    # -- running ---------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def forward(self, inputs: Inputs, *, adapter_name: str | None = None, **kwargs: Any) -> ModelOutput:
        """Run the module in training mode with gradients, and keep the result for `calculate_loss`. Returns `logits` [B, T, V]."""

    @abstractmethod
    def forward_only(
        self, inputs: Inputs, *, adapter_name: str | None = None, disable_lora: bool = False, **kwargs: Any
    ) -> ModelOutput:
        """Run the module in evaluation mode without gradients. `disable_lora=True` runs the base model alone.

        Where the batch has what the loss needs, the loss and the metrics are computed too. `return_outputs=('logps', 'embeddings')`,
        say, gives exactly these keys of `ModelOutput` instead, without a loss.
        """

    @abstractmethod
    def calculate_loss(self, *, adapter_name: str | None = None, **kwargs: Any) -> float:
        """The loss of the last `forward`, a mean over what the loss counts. Further keywords go to the loss.

        Raises:
            StateError: if there was no `forward` since the last `backward`.
        """

    @abstractmethod
    def backward(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        """Accumulate the gradients of the last `calculate_loss`. One micro-batch of the window.

        Raises:
            StateError: if there is no loss to differentiate.
        """

    @abstractmethod
    def forward_backward(
        self,
        inputs: Inputs,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        return_logits: bool = False,
        **kwargs: Any,
    ) -> ModelOutput:
        """Forward, loss and backward of one micro-batch. Returns `loss` (the mean, a float) and `num_tokens`.

        Logits are not materialised unless the loss, a metric or `return_logits` asks for them. Further keywords go to the loss.
        """

    # -- stepping --------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def clip_grad_norm(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2.0,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
    ) -> float | None:
        """Clip by the global norm; returns the norm before clipping, of unscaled, normalised gradients. None off the boundary."""

    @abstractmethod
    def step(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        """Step the optimizer with gradients that are normalised by the window's token count.

        Raises:
            StateError: without an optimizer, or without a backward since the last step.
        """

    @abstractmethod
    def zero_grad(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        """Drop the window's gradients and begin a new window."""

    @abstractmethod
    def lr_step(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        """Advance the learning-rate schedule by one optimizer step."""

    @abstractmethod
    def clip_grad_and_step(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2.0,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        flush: bool = False,
    ) -> float | None:
        """`clip_grad_norm`, `step`, `zero_grad` and `lr_step` in one. `flush=True` closes a partial window, if there is one.

        Returns:
            The gradient norm before clipping, or None when this call was not at a boundary.
        """

    # -- setting up ------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, *, gradient_accumulation_steps: int | None = None, **kwargs: Any
    ) -> str:
        """Add a trainable adapter from a PEFT config or a saved adapter's folder. Returns its name.

        Raises:
            DuplicateAdapterError: the name is taken; nothing has changed.
        """

    @abstractmethod
    def set_loss(self, loss: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Choose the loss: a name, class, instance or function."""

    @abstractmethod
    def set_optimizer(self, optimizer: Any = 'default', *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Choose the optimizer: a name, class or instance. Keywords go to its constructor."""

    @abstractmethod
    def set_lr_scheduler(
        self, lr_scheduler: Any = 'default', *, adapter_name: str | None = None, **kwargs: Any
    ) -> None:
        """Choose the learning-rate schedule: a name, class or instance. Counts optimizer steps."""

    @abstractmethod
    def set_template(self, template: Any = 'default', *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Choose the template that turns trajectories into features."""

    @abstractmethod
    def set_processor(self, processor: Any = 'default', *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Choose the input processor that turns features into tensors."""

    @abstractmethod
    def add_metric(
        self, metric: Any, *, is_training: bool | None = None, adapter_name: str | None = None, **kwargs: Any
    ) -> None:
        """Add a metric; `is_training=None` accumulates separately in training and in `forward_only`."""

    @abstractmethod
    def calculate_metric(self, is_training: bool = True, *, adapter_name: str | None = None) -> dict[str, float]:
        """The metrics since the last call, reduced over data-parallel ranks; accumulation starts anew."""

    @abstractmethod
    def apply_patch(self, patch: Any, **kwargs: Any) -> None:
        """Change the module by a patch: a name, class, instance or function."""

    @abstractmethod
    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        """A readable table of what is being trained, and how."""

    # -- keeping ---------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, Tensor]:
        """The adapter's weights (PEFT's names), or all weights when there is no adapter, whole and on the CPU."""

    @abstractmethod
    def save(
        self,
        name: str | None = None,
        output_dir: str | Path = 'output',
        *,
        adapter_name: str | None = None,
        save_optimizer: bool = False,
        consumed_train_samples: int = 0,
        keep_last: int | None = None,
        async_save: bool = False,
        merge_lora: bool = False,
    ) -> str:
        """Write weights to `output_dir/name`, in the layout that Transformers and PEFT read; returns that folder.

        Args:
            name: the checkpoint's folder within `output_dir`; `checkpoint-<step>` when left out.
            save_optimizer: also all that an exact resume needs.
            consumed_train_samples: kept in `trainer_state.json`, for `DataLoader.resume_from_checkpoint`.
            keep_last: how many checkpoints of `output_dir` to keep; older ones are deleted.
            async_save: write a snapshot in a thread while training goes on. The next save into `output_dir`, the end of
                `twinkle.initialize(...)` and `twinkle.checkpoint.wait_for_saves()` wait for it, and raise what went wrong.
            merge_lora: write the whole model with the adapter merged into it, instead of the adapter.

        Raises:
            NameNotAllowedError: the name would leave `output_dir`.
            StateError: training state was asked for in the middle of an accumulation window.
            ConfigError: options that exclude each other.
        """

    @abstractmethod
    def load(self, checkpoint: str | Path, *, adapter_name: str | None = None) -> None:
        """Load weights that `save`, Transformers or PEFT wrote. Missing or unexpected keys raise, and change nothing."""

    def resume_from_checkpoint(
        self, checkpoint: str | Path, *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> dict[str, int]:
        """Load weights and training state. A backend that keeps no training state need not offer it.

        Returns:
            `cur_step`, `consumed_train_samples` and `gradient_accumulation_steps`.
        """
        from twinkle.errors import NotSupportedError

        raise NotSupportedError(
            f'{type(self).__name__} keeps no training state to resume from. load({str(checkpoint)!r}) loads the weights alone.'
        )

    @abstractmethod
    def adapter(self, adapter_name: str) -> AbstractContextManager[str]:
        """Within the context, an omitted `adapter_name` means this adapter. Nests; restored after exceptions."""

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The module itself, for what this interface has no word for (generation, say)."""
