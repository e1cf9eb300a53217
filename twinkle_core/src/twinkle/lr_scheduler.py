"""Learning-rate schedules with warm-up. PyTorch's own are in the registry `lr_schedulers` under their class names.

Each counts optimizer steps: the factor at step k is what the k-th step (from 0) is taken with.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LRScheduler

from twinkle.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ['ConstantScheduler', 'CosineWarmupScheduler', 'LinearWarmupScheduler']


def _steps(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        share = (
            ' A share of the run is not taken: multiply it by num_training_steps.' if isinstance(value, float) else ''
        )
        raise ConfigError(f'{name}={value!r} must be a whole number of optimizer steps, at least {least}.{share}')
    return value


class _WarmupScheduler(LRScheduler):
    """Linear warm-up from 0, then `decay`. State is plain numbers, so that it can be written as JSON."""

    def __init__(self, optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> None:
        self.num_warmup_steps = _steps('num_warmup_steps', num_warmup_steps, 0)
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        """What the base learning rate is multiplied by at a step."""
        if step < self.num_warmup_steps:
            return step / max(1, self.num_warmup_steps)
        return self.decay(step)

    @abstractmethod
    def decay(self, step: int) -> float:
        """The factor after warm-up."""

    def get_lr(self) -> list[float | Tensor]:
        factor = self.factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]


class _DecayingScheduler(_WarmupScheduler):
    def __init__(
        self, optimizer: Optimizer, num_training_steps: int, num_warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        num_training_steps = _steps('num_training_steps', num_training_steps, 1)
        if _steps('num_warmup_steps', num_warmup_steps, 0) > num_training_steps:
            raise ConfigError(
                f'num_warmup_steps={num_warmup_steps} is more than num_training_steps={num_training_steps}: the schedule would never '
                'leave its warm-up.'
            )
        self.num_training_steps = num_training_steps
        super().__init__(optimizer, num_warmup_steps, last_epoch)

    def progress(self, step: int) -> float:
        """The share of the steps after warm-up that have passed."""
        return (step - self.num_warmup_steps) / max(1, self.num_training_steps - self.num_warmup_steps)


class CosineWarmupScheduler(_DecayingScheduler):
    """Linear warm-up, then half a cosine from 1 to `min_lr_ratio`, as Transformers' `get_cosine_schedule_with_warmup`.

    Args:
        optimizer: whose groups' learning rates to move.
        num_training_steps: optimizer steps until the end of the schedule.
        num_warmup_steps: of these, steps of warm-up.
        num_cycles: cosine periods; 0.5 ends at the minimum.
        min_lr_ratio: the factor at the end.

    Raises:
        ConfigError: numbers that make no schedule.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_training_steps: int,
        num_warmup_steps: int = 0,
        num_cycles: float = 0.5,
        min_lr_ratio: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= min_lr_ratio <= 1:
            raise ConfigError(f'min_lr_ratio={min_lr_ratio!r} must be from 0 to 1.')
        self.num_cycles, self.min_lr_ratio = num_cycles, min_lr_ratio
        super().__init__(optimizer, num_training_steps, num_warmup_steps, last_epoch)

    def decay(self, step: int) -> float:
        cosine = max(0.0, 0.5 * (1.0 + math.cos(math.pi * self.num_cycles * 2.0 * self.progress(step))))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * cosine


class LinearWarmupScheduler(_DecayingScheduler):
    """Linear warm-up, then linearly to 0, as Transformers' `get_linear_schedule_with_warmup`. Raises as the cosine does."""

    def decay(self, step: int) -> float:
        return max(0.0, (self.num_training_steps - step) / max(1, self.num_training_steps - self.num_warmup_steps))


class ConstantScheduler(_WarmupScheduler):
    """Linear warm-up (none by default), then the base learning rate."""

    def __init__(self, optimizer: Optimizer, num_warmup_steps: int = 0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, num_warmup_steps, last_epoch)

    def decay(self, step: int) -> float:
        return 1.0
