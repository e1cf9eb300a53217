"""Rewards of sampled answers; names are in the registry `rewards`."""

from twinkle.reward.base import Reward
from twinkle.reward.rules import AnswerReward, FormatReward, LengthReward

__all__ = ['AnswerReward', 'FormatReward', 'LengthReward', 'Reward']
