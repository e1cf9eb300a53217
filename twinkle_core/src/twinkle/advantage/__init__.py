"""Advantages of sampled answers, from their rewards; names are in the registry `advantages`."""

from twinkle.advantage.group import GRPOAdvantage, RLOOAdvantage

__all__ = ['GRPOAdvantage', 'RLOOAdvantage']
