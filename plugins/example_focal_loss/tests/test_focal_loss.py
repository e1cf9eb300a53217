"""The focal loss is found by name and follows its formula."""

import pytest
import torch

from twinkle.errors import ConfigError
from twinkle.registry import losses


def test_formula():
    """Each token weighs (1 - p)^gamma, and -100 counts nothing."""
    p = torch.tensor([[0.9, 0.5, 0.2]], dtype=torch.float64)
    labels = torch.tensor([[1, 2, -100]])
    result = losses.build('focal', gamma=2.0)({'labels': labels}, {'logps': p.log()})
    expected = -(0.1**2 * torch.tensor(0.9).double().log() + 0.5**2 * torch.tensor(0.5).double().log())
    assert float(result.loss_sum) == pytest.approx(float(expected), rel=1e-6)
    assert int(result.count) == 2


def test_gamma_zero_is_cross_entropy():
    """Without the weight it is the plain sum."""
    logps = torch.randn(2, 4).neg()
    result = losses.build('FocalLoss', gamma=0.0)({'labels': torch.ones(2, 4)}, {'logps': logps})
    assert float(result.loss_sum) == pytest.approx(float(-logps.sum()), rel=1e-6)


def test_negative_gamma_is_refused():
    """The error names the value and the rule."""
    with pytest.raises(ConfigError, match='gamma=-1'):
        losses.build('focal', gamma=-1)
