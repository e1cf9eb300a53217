"""Advantages within groups: several answers to one prompt, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from twinkle.errors import ConfigError, DataError

__all__ = ['GRPOAdvantage', 'RLOOAdvantage']


def _groups(rewards: Sequence[float], num_generations: int, name: str) -> list[list[float]]:
    values = [float(reward) for reward in rewards]
    if len(values) % num_generations:
        raise DataError(f'{name}: {len(values)} rewards do not fill groups of num_generations={num_generations}.')
    return [values[i : i + num_generations] for i in range(0, len(values), num_generations)]


class GRPOAdvantage:
    """`(r - mean) / (std + eps)` within each group.

    The standard deviation is the sample's, over n - 1, as `torch.std` and TRL take it. `scale=False` leaves the division out (Liu et
    al., 2025). Source: Shao et al., DeepSeekMath, 2024.

    Raises:
        ConfigError: groups of fewer than two.
        DataError: rewards that do not fill groups.
    """

    def __init__(self, num_generations: int, *, scale: bool = True, eps: float = 1e-4) -> None:
        if num_generations < 2:
            raise ConfigError(
                f'GRPOAdvantage: num_generations={num_generations!r} must be at least 2: a group is compared with itself.'
            )
        self.num_generations, self.scale, self.eps = num_generations, scale, eps

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per reward, in their order."""
        result = []
        for group in _groups(rewards, self.num_generations, 'GRPOAdvantage'):
            mean = sum(group) / len(group)
            std = (sum((r - mean) ** 2 for r in group) / (len(group) - 1)) ** 0.5
            result += [(r - mean) / (std + self.eps) if self.scale else r - mean for r in group]
        return result


class RLOOAdvantage:
    """`r - mean of the others` within each group (leave one out).

    Source: Ahmadian et al., Back to Basics, 2024. Raises as `GRPOAdvantage` does.
    """

    def __init__(self, num_generations: int) -> None:
        if num_generations < 2:
            raise ConfigError(
                f'RLOOAdvantage: num_generations={num_generations!r} must be at least 2: there are no others.'
            )
        self.num_generations = num_generations

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per reward, in their order."""
        result = []
        for group in _groups(rewards, self.num_generations, 'RLOOAdvantage'):
            total = sum(group)
            result += [r - (total - r) / (len(group) - 1) for r in group]
        return result
