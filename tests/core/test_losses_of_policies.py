"""Policy losses: values and gradients in any layout, weights, answers with nothing to learn from, metrics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.layouts import LAYOUTS, Samples, gradients, lay_out, make_samples
from twinkle.errors import DataError
from twinkle.loss import BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, PPOLoss, SAPOLoss
from twinkle.metric import GRPOMetric, TrainInfo

EXTRA = ('old_logps', 'ref_logps', 'entropies')


def surrogate(ratio, a, low, high):
    """`-min(r A, clip(r) A)`, by cases."""
    if float(a) >= 0:
        return -(ratio.clamp(max=1 + high) * a)
    return -(ratio.clamp(min=1 - low) * a)


def tokens_of(kind, logp, old, a):
    ratio = torch.exp(logp - old)
    if kind == 'gspo':
        one = torch.exp((logp - old).mean())
        return surrogate(one, a, 0.1, 0.1) * torch.ones_like(logp)
    if kind == 'sapo':
        tau = 1.0 if a > 0 else 1.05
        return -(4 / tau) / (1 + torch.exp(-tau * (ratio - 1))) * a
    if kind == 'cispo':
        return -ratio.detach().clamp(max=1.5) * a * logp
    return surrogate(ratio, a, 0.1, 0.2)


def formula(kind, samples, advantages, *, beta=0.0, entropy=0.0, weights=None):
    """The sum and the count, sample by sample."""
    total, count = 0.0, 0.0
    for i, mask in enumerate(samples.kept):
        weight = 1.0 if weights is None else weights[i]
        if not mask.any():
            continue
        logp, old, ref, ent = (
            values[mask] for values in (samples.logps[i], *(samples.by_token[name][i] for name in EXTRA))
        )
        losses = tokens_of(kind, logp, old, advantages[i])
        losses = losses + beta * (torch.exp(ref - logp) - (ref - logp) - 1) - entropy * ent
        if kind in ('grpo', 'gspo', 'sapo'):
            total, count = total + weight * losses.mean(), count + weight
        elif kind == 'dr_grpo':
            total, count = total + weight * losses.sum() / 20, count + weight
        else:
            total, count = total + weight * losses.sum(), count + weight * len(losses)
    return total, count


LOSSES = {
    'grpo': lambda **o: GRPOLoss(0.1, 0.2, **o),
    'bnpo': lambda **o: BNPOLoss(0.1, 0.2, **o),
    'dr_grpo': lambda **o: DRGRPOLoss(20, epsilon=0.1, epsilon_high=0.2, **o),
    'gspo': lambda **o: GSPOLoss(0.1, 0.1, **o),
    'sapo': lambda **o: SAPOLoss(**o),
    'cispo': lambda **o: CISPOLoss(0.5, **o),
    'ppo': lambda **o: PPOLoss(0.1, epsilon_high=0.2, **o),
}


def run(loss, samples, layout, advantages, garbage=99.0, **more):
    batch, outputs = lay_out(samples, layout, garbage)
    outputs['entropies'] = batch.pop('entropies')
    return loss({**batch, 'advantages': torch.tensor(advantages)}, outputs, **more)


def check(result, expected, count, samples):
    assert float(result.count) == pytest.approx(count, rel=1e-6)
    # Advantages and weights pass through fp32.
    assert float(result.loss_sum.detach()) == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6)
    for got, wanted in zip(gradients(result.loss_sum, samples), gradients(expected, samples), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('kind', LOSSES)
@settings(deadline=None, max_examples=25)
@given(
    count=st.integers(1, 6),
    layout=st.sampled_from(LAYOUTS),
    garbage=st.sampled_from([0.0, 99.0, -1e30, math.inf, math.nan]),
    options=st.sampled_from([{}, {'beta': 0.3}, {'beta': 0.1, 'entropy_coef': 0.2}]),
    seed=st.integers(0, 999),
)
def test_value_and_gradients_equal_the_formula(kind, count, layout, garbage, options, seed):
    """Whatever the layout, and whatever stands in padded places."""
    samples = make_samples(count, seed=seed, extra=EXTRA)
    advantages = torch.randn(count, generator=torch.Generator().manual_seed(seed)).tolist()
    loss = LOSSES[kind](**options)
    result = run(loss, samples, layout, advantages, garbage)
    expected, counted = formula(kind, samples, advantages, beta=loss.beta, entropy=loss.entropy_coef)
    check(result, expected, counted, samples)


@pytest.mark.parametrize('kind', LOSSES)
def test_a_batch_is_the_sum_of_its_samples(kind):
    """One by one or together: the same sum and count."""
    samples = make_samples(5, seed=1, extra=EXTRA)
    advantages = [1.0, -0.5, 0.0, 2.0, -1.0]
    loss = LOSSES[kind](beta=0.1, entropy_coef=0.1)
    whole = run(loss, samples, 'rows of several', advantages)
    parts = [
        run(loss, Samples([samples.kept[i]], [samples.logps[i]], {k: [v[i]] for k, v in samples.by_token.items()}),
            'tight', advantages[i : i + 1])
        for i in range(5)
    ]  # fmt: skip
    assert float(whole.loss_sum.detach()) == pytest.approx(float(sum(p.loss_sum.detach() for p in parts)), rel=1e-6)
    assert float(whole.count) == float(sum(p.count for p in parts))


@pytest.mark.parametrize('kind', LOSSES)
def test_answers_without_a_label_count_nothing(kind):
    """They add 0 to the sum and to the count, and give no NaN; so does a whole batch of them."""
    samples = make_samples(4, seed=2, extra=EXTRA)
    samples.kept[1] = torch.zeros_like(samples.kept[1])
    advantages = [1.0, 5.0, -1.0, 0.3]
    loss = LOSSES[kind](beta=0.1)
    result = run(loss, samples, 'padded', advantages)
    expected, counted = formula(kind, samples, advantages, beta=0.1)
    check(result, expected, counted, samples)
    samples.kept = [torch.zeros_like(mask) for mask in samples.kept]
    result = run(loss, samples, 'padded', advantages)
    assert (float(result.loss_sum.detach()), float(result.count)) == (0.0, 0.0)
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients(result.loss_sum, samples))


@pytest.mark.parametrize('kind', LOSSES)
@pytest.mark.parametrize('layout', ['padded left', 'one row'])
def test_sample_weights_weigh_answers(kind, layout):
    """They multiply a sample's terms and what is counted of it."""
    samples = make_samples(4, seed=3, extra=EXTRA)
    advantages, weights = [1.0, -2.0, 0.5, 0.1], [1.0, 0.0, 2.0, 0.5]
    result = run(LOSSES[kind](), samples, layout, advantages, sample_weights=weights)
    check(result, *formula(kind, samples, advantages, weights=weights), samples)


@pytest.mark.parametrize('kind', LOSSES)
def test_loss_weights_of_0_leave_tokens_out(kind):
    """A token of weight 0 is as one without a label."""
    samples = make_samples(4, seed=4, extra=(*EXTRA, 'loss_weights'), low=4)
    for mask, weights in zip(samples.kept, samples.by_token['loss_weights'], strict=True):
        weights.fill_(1.0)
        weights[int(mask.nonzero()[-1])] = 0.0
    advantages = [1.0, -2.0, 0.5, 0.1]
    result = run(LOSSES[kind](beta=0.1), samples, 'padded', advantages)
    samples.kept = [m & (w > 0) for m, w in zip(samples.kept, samples.by_token['loss_weights'], strict=True)]
    check(result, *formula(kind, samples, advantages, beta=0.1), samples)


@pytest.mark.parametrize('kind', LOSSES)
def test_without_old_log_probabilities_the_ratio_is_1(kind):
    """The gradient is the plain policy gradient: minus the advantage, averaged as the loss averages (SAPO's gate has slope 1 there)."""
    samples = make_samples(3, seed=5, extra=EXTRA)
    samples.by_token['old_logps'] = [value.detach() for value in samples.logps]
    advantages = [1.0, -1.0, 0.5]
    batch, outputs = lay_out(samples, 'padded')
    del batch['old_logps']
    result = LOSSES[kind]()({**batch, 'advantages': advantages}, outputs)
    expected, counted = formula(kind, samples, advantages)
    check(result, expected, counted, samples)
    for i, gradient in enumerate(gradients(result.loss_sum, samples)):
        n = int(samples.kept[i].sum())
        scale = {'grpo': 1 / n, 'gspo': 1 / n, 'sapo': 1 / n, 'dr_grpo': 1 / 20}.get(kind, 1.0)
        assert gradient[samples.kept[i]].tolist() == pytest.approx([-advantages[i] * scale] * n, rel=1e-5)


def test_metrics_are_means_over_tokens():
    """KL, clip fraction, entropy and ratio of two unequal micro-batches, as one batch gives them."""
    samples = make_samples(6, seed=6, extra=EXTRA)
    advantages = [1.0, -2.0, 0.5, 0.1, -0.2, 3.0]
    loss = GRPOLoss(0.1, beta=0.2, entropy_coef=0.1)
    metric = GRPOMetric()
    for part in (slice(0, 2), slice(2, 6)):
        some = Samples(samples.kept[part], samples.logps[part], {k: v[part] for k, v in samples.by_token.items()})
        metric.update({}, {}, run(loss, some, 'padded', advantages[part]))
    numbers = metric.compute(metric.sums(), TrainInfo())

    def joined(parts):
        return torch.cat([values.detach()[mask] for values, mask in zip(parts, samples.kept, strict=True)])

    logp, old, ref = joined(samples.logps), *(joined(samples.by_token[name]) for name in ('old_logps', 'ref_logps'))
    a = joined([torch.full(mask.shape, value) for mask, value in zip(samples.kept, advantages, strict=True)])
    ratio = (logp - old).exp()
    held = ((ratio > 1.1) & (a > 0)) | ((ratio < 0.9) & (a < 0))
    assert numbers['ratio'] == pytest.approx(float(ratio.mean()), rel=1e-6)
    assert numbers['kl'] == pytest.approx(float(((ref - logp).exp() - (ref - logp) - 1).mean()), rel=1e-6)
    assert numbers['clip_fraction'] == pytest.approx(float(held.double().mean()), rel=1e-6)
    assert numbers['entropy'] == pytest.approx(float(joined(samples.by_token['entropies']).mean()), rel=1e-6)


def test_values_of_a_value_head_in_any_layout():
    """PPO's value part: padded places do not matter, tokens are summed."""
    extra = (*EXTRA, 'returns', 'old_values', 'values')
    samples = make_samples(4, seed=9, extra=extra)
    loss = PPOLoss(value_coef=0.5, value_clip=0.3)
    results = []
    for layout in LAYOUTS:
        batch, outputs = lay_out(samples, layout, math.nan)
        outputs['values'] = torch.nan_to_num(batch.pop('values'), 5.0).requires_grad_()
        result = loss({**batch, 'advantages': [1.0, -1.0, 0.0, 2.0]}, outputs)
        assert torch.isfinite(torch.autograd.grad(result.loss_sum, outputs['values'], retain_graph=True)[0]).all()
        results.append(float(result.loss_sum.detach()))
    policy, _ = formula('ppo', samples, [1.0, -1.0, 0.0, 2.0])
    policy = float(PPOLoss()({**batch, 'advantages': [1.0, -1.0, 0.0, 2.0]}, outputs).loss_sum.detach())
    errors = 0.0
    for mask, v, old, returns in zip(
        samples.kept, *(samples.by_token[name] for name in ('values', 'old_values', 'returns')), strict=True
    ):
        bounded = torch.minimum(torch.maximum(v, old - 0.3), old + 0.3)
        errors += float(torch.maximum((v - returns) ** 2, (bounded - returns) ** 2)[mask].sum())
    assert results == pytest.approx([policy + 0.25 * errors] * len(LAYOUTS), rel=1e-5)


def test_inputs_that_do_not_fit_are_refused():
    """By name, with both shapes."""
    samples = make_samples(3, extra=EXTRA)
    batch, outputs = lay_out(samples, 'padded')
    for name, value in (('old_logps', torch.zeros(3, 1)), ('ref_logps', torch.zeros(3)), ('advantages', [1.0, 2.0])):
        with pytest.raises(DataError, match=name):
            GRPOLoss(beta=0.1)({**batch, 'advantages': [1.0, 2.0, 3.0], name: value}, outputs)
