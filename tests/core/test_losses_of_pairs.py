"""Losses of preference pairs: values and gradients in any layout, weights, pairs with nothing to learn from."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.layouts import LAYOUTS, Samples, gradients, lay_out, make_samples
from twinkle.errors import DataError
from twinkle.loss import CPOLoss, DPOLoss, ORPOLoss, SimPOLoss


def log_sigmoid(x):
    return -torch.log1p(torch.exp(-x))


def totals(samples, values):
    return [value[mask].sum() for mask, value in zip(samples.kept, values, strict=True)]


def means(samples):
    return [value[mask].mean() for mask, value in zip(samples.kept, samples.logps, strict=True)]


def in_pairs(values):
    return list(zip(values[0::2], values[1::2], strict=True))


def dpo(samples, beta, kind, smoothing=0.0, sft_weight=0.0, reference=True):
    """The sum over pairs, written out."""
    policy = totals(samples, samples.logps)
    base = totals(samples, samples.by_token['ref_logps']) if reference else [0.0] * samples.count
    ratios = [p - b for p, b in zip(policy, base, strict=True)]
    kl_c, kl_r = (max(0.0, sum(float(r.detach()) for r in side) / len(side)) for side in (ratios[0::2], ratios[1::2]))
    total = 0.0
    for (chosen, rejected), (likelihood, _) in zip(in_pairs(ratios), in_pairs(means(samples)), strict=True):
        h = chosen - rejected
        total = total + {
            'sigmoid': lambda h: -(1 - smoothing) * log_sigmoid(beta * h) - smoothing * log_sigmoid(-beta * h),
            'hinge': lambda h: (1 - beta * h).clamp(min=0),
            'ipo': lambda h: (h - 1 / (2 * beta)) ** 2,
            'kto_pair': lambda h, c=chosen, r=rejected: (
                1 - 1 / (1 + torch.exp(-beta * (c - kl_r))) + 1 - 1 / (1 + torch.exp(-beta * (kl_c - r)))
            ),
        }[kind](h)
        total = total - sft_weight * likelihood
    return total


def simpo(samples, beta, gamma):
    return -sum(log_sigmoid(beta * (c - r) - gamma) for c, r in in_pairs(means(samples)))


def cpo(samples, beta, alpha):
    sums = in_pairs(totals(samples, samples.logps))
    return sum(
        -log_sigmoid(beta * (c - r)) - alpha * m for (c, r), (m, _) in zip(sums, in_pairs(means(samples)), strict=True)
    )


def orpo(samples, weight):
    def odds(m):
        return torch.exp(m) / (1 - torch.exp(m))

    return sum(-c - weight * log_sigmoid(torch.log(odds(c) / odds(r))) for c, r in in_pairs(means(samples)))


LOSSES = {
    'dpo': (DPOLoss(0.1), lambda s: dpo(s, 0.1, 'sigmoid')),
    'dpo smoothed with sft': (
        DPOLoss(0.3, label_smoothing=0.2, sft_weight=0.7),
        lambda s: dpo(s, 0.3, 'sigmoid', 0.2, 0.7),
    ),
    'dpo hinge': (DPOLoss(0.5, 'hinge'), lambda s: dpo(s, 0.5, 'hinge')),
    'dpo ipo': (DPOLoss(0.4, 'ipo'), lambda s: dpo(s, 0.4, 'ipo')),
    'dpo kto_pair': (DPOLoss(0.4, 'kto_pair'), lambda s: dpo(s, 0.4, 'kto_pair')),
    'dpo without a reference': (DPOLoss(0.2, reference_free=True), lambda s: dpo(s, 0.2, 'sigmoid', reference=False)),
    'simpo': (SimPOLoss(2.0, 1.0), lambda s: simpo(s, 2.0, 1.0)),
    'cpo': (CPOLoss(0.2, 0.6), lambda s: cpo(s, 0.2, 0.6)),
    'orpo': (ORPOLoss(0.3), lambda s: orpo(s, 0.3)),
}


@pytest.mark.parametrize('name', LOSSES)
@settings(deadline=None, max_examples=20)
@given(
    pairs=st.integers(1, 4),
    layout=st.sampled_from(LAYOUTS),
    garbage=st.sampled_from([0.0, 99.0, -1e30, math.inf, math.nan]),
    seed=st.integers(0, 999),
)
def test_value_and_gradients_equal_the_formula(name, pairs, layout, garbage, seed):
    """Whatever the layout, and whatever stands in padded places (CASES 19)."""
    loss, formula = LOSSES[name]
    samples = make_samples(2 * pairs, seed=seed, extra=('ref_logps',))
    batch, outputs = lay_out(samples, layout, garbage)
    result = loss(batch, outputs)
    expected = formula(samples)
    assert float(result.count) == pairs
    # References and options pass through fp32.
    assert float(result.loss_sum.detach()) == pytest.approx(float(expected.detach()), rel=2e-6, abs=2e-6)
    for got, wanted in zip(gradients(result.loss_sum, samples), gradients(expected, samples), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', [name for name in LOSSES if 'kto' not in name])
def test_a_batch_is_the_sum_of_its_pairs(name):
    """One by one or together: the same sum (kto_pair looks at the batch's mean, so not that)."""
    loss, _ = LOSSES[name]
    samples = make_samples(8, seed=3, extra=('ref_logps',))
    whole = loss(*lay_out(samples, 'padded'))
    parts = [
        loss(*lay_out(Samples(*(x[i : i + 2] for x in (samples.kept, samples.logps)),
                              {k: v[i : i + 2] for k, v in samples.by_token.items()}), 'tight'))
        for i in range(0, 8, 2)
    ]  # fmt: skip
    assert float(whole.loss_sum.detach()) == pytest.approx(float(sum(p.loss_sum.detach() for p in parts)), rel=1e-6)
    assert float(whole.count) == sum(float(p.count) for p in parts)


def one_pair(chosen, rejected):
    """A pair of two-token samples with the given mean log-probabilities per token, one token each."""
    samples = Samples(
        [torch.tensor([True, False])] * 2,
        [torch.tensor([value, 0.0], dtype=torch.float64, requires_grad=True) for value in (chosen, rejected)],
    )
    return samples


def test_an_answer_that_is_certain_keeps_orpo_finite():
    """log(1 - p) of p = 1 has no value; the loss and its gradient stay numbers."""
    samples = one_pair(0.0, -0.7)
    result = ORPOLoss(0.1)(*lay_out(samples, 'tight'))
    assert math.isfinite(float(result.loss_sum.detach()))
    assert all(torch.isfinite(gradient).all() for gradient in gradients(result.loss_sum, samples))


def test_odds_of_nearly_certain_answers_are_exact():
    """fp32 log-probabilities near 0 lose no digits to 1 - p."""
    samples = one_pair(-1e-4, -2e-4)
    batch, outputs = lay_out(samples, 'tight')
    result = ORPOLoss(1.0)(batch, {'logps': outputs['logps'].float()})
    expected = orpo(samples, 1.0)
    assert float(result.loss_sum.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_metrics_are_sums_over_pairs():
    """Implicit rewards, how often the chosen one's is higher, and the pairs."""
    samples = make_samples(6, seed=1, extra=('ref_logps',))
    result = DPOLoss(0.1)(*lay_out(samples, 'one row'))
    ratios = [
        float(p.detach() - b)
        for p, b in zip(totals(samples, samples.logps), totals(samples, samples.by_token['ref_logps']), strict=True)
    ]
    metrics = {key: float(value) for key, value in result.metrics.items()}
    assert metrics['chosen_rewards'] == pytest.approx(0.1 * sum(ratios[0::2]), rel=1e-5)
    assert metrics['rejected_rewards'] == pytest.approx(0.1 * sum(ratios[1::2]), rel=1e-5)
    assert metrics['right'] == sum(c > r for c, r in in_pairs(ratios))
    assert metrics['pairs'] == 3


@pytest.mark.parametrize('name', LOSSES)
def test_pairs_without_labels_count_nothing(name):
    """Where truncation left a side with nothing to learn from, the pair adds 0 and is not counted; no gradient is NaN."""
    loss, formula = LOSSES[name]
    samples = make_samples(6, seed=5, extra=('ref_logps',))
    samples.kept[2] = torch.zeros_like(samples.kept[2])
    batch, outputs = lay_out(samples, 'padded')
    result = loss(batch, outputs)
    rest = [0, 1, 4, 5]
    others = Samples([samples.kept[i] for i in rest], [samples.logps[i] for i in rest],
                     {k: [v[i] for i in rest] for k, v in samples.by_token.items()})  # fmt: skip
    assert float(result.count) == 2
    assert float(result.loss_sum.detach()) == pytest.approx(float(formula(others).detach()), rel=2e-6, abs=2e-6)
    for gradient in gradients(result.loss_sum, samples)[2:4]:
        assert torch.equal(gradient, torch.zeros_like(gradient))
    nothing = Samples([torch.zeros_like(mask) for mask in samples.kept], samples.logps, samples.by_token)
    result = loss(*lay_out(nothing, 'padded'))
    assert (float(result.loss_sum.detach()), float(result.count)) == (0.0, 0.0)
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients(result.loss_sum, samples))


@pytest.mark.parametrize('name', [name for name in LOSSES if 'kto' not in name])
@pytest.mark.parametrize('layout', ['padded', 'one row'])
def test_sample_weights_weigh_pairs(name, layout):
    """A pair of weight 2 is the pair twice, but for kto_pair's mean; what is counted is the weight."""
    loss, _ = LOSSES[name]
    samples = make_samples(6, seed=7, extra=('ref_logps',))
    twice = [0, 1, 2, 3, 2, 3, 4, 5]
    repeated = Samples([samples.kept[i] for i in twice], [samples.logps[i] for i in twice],
                       {k: [v[i] for i in twice] for k, v in samples.by_token.items()})  # fmt: skip
    batch, outputs = lay_out(samples, layout)
    weighted = loss(batch, outputs, sample_weights=[1.0, 1.0, 2.0, 2.0, 1.0, 1.0])
    plain = loss(*lay_out(repeated, layout))
    assert float(weighted.count) == float(plain.count) == 4
    assert float(weighted.loss_sum.detach()) == pytest.approx(float(plain.loss_sum.detach()), rel=1e-6)
    for got, wanted in zip(gradients(weighted.loss_sum, samples), gradients(plain.loss_sum, samples), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)
    with pytest.raises(DataError, match='sample_weights'):
        loss(batch, outputs, sample_weights=[1.0])


@pytest.mark.parametrize('name', LOSSES)
def test_loss_weights_of_0_leave_tokens_out(name):
    """A token of weight 0 is as one without a label, of the reference too; weights are relative within a mean."""
    loss, formula = LOSSES[name]
    samples = make_samples(4, seed=8, extra=('ref_logps', 'loss_weights'), low=4)
    kept = samples.kept
    for mask, weights in zip(kept, samples.by_token['loss_weights'], strict=True):
        weights.fill_(1.0)
        weights[int(mask.nonzero()[-1])] = 0.0
    result = loss(*lay_out(samples, 'padded'))
    samples.kept = [mask & (w > 0) for mask, w in zip(kept, samples.by_token['loss_weights'], strict=True)]
    others = [i for i in (0, 2) if samples.kept[i].any() and samples.kept[i + 1].any()]
    assert float(result.count) == len(others)
    rest = [j for i in others for j in (i, i + 1)]
    expected = formula(Samples([samples.kept[i] for i in rest], [samples.logps[i] for i in rest],
                               {k: [v[i] for i in rest] for k, v in samples.by_token.items()}))  # fmt: skip
    assert float(result.loss_sum.detach()) == pytest.approx(float(expected.detach()), rel=2e-6, abs=2e-6)


def test_references_of_another_shape_are_refused():
    """Where broadcasting would give a wrong number; sums per sample are taken."""
    samples = make_samples(4, extra=('ref_logps',))
    batch, outputs = lay_out(samples, 'padded')
    reference = torch.stack(totals(samples, samples.by_token.pop('ref_logps')))
    expected = float(DPOLoss()(batch, outputs).loss_sum.detach())
    del batch['ref_logps']
    assert float(DPOLoss()(batch, outputs, ref_logps=reference).loss_sum.detach()) == pytest.approx(expected, rel=1e-5)
    for shape in ((1,), (4, 1), (3,)):
        with pytest.raises(DataError, match='ref_logps'):
            DPOLoss()(batch, outputs, ref_logps=torch.zeros(shape))
