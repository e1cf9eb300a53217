"""DPO and its relatives, the policy losses, distillation and InfoNCE against formulas in float64 and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.advantage import GRPOAdvantage, RLOOAdvantage
from twinkle.errors import ConfigError, DataError
from twinkle.loss import (
    BNPOLoss,
    CISPOLoss,
    CPOLoss,
    DPOLoss,
    DRGRPOLoss,
    GKDLoss,
    GRPOLoss,
    GSPOLoss,
    InfonceLoss,
    ORPOLoss,
    PPOLoss,
    SAPOLoss,
    SimPOLoss,
)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def samples(count, *, seed=0, low=2, high=6):
    """Samples of unequal length: labels (the first of each not trained), log-probabilities of policy, old policy, reference."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        n = int(rng.integers(low, high + 1))
        labels = rng.integers(0, 9, n)
        labels[0] = -100
        logps, old, ref = (-rng.gamma(1.0, 0.7, n) for _ in range(3))
        for values in (logps, old, ref):
            values[0] = 0.0
        made.append({'labels': labels, 'logps': logps, 'old_logps': old, 'ref_logps': ref, 'entropies': rng.random(n)})
    return made


KEYS = ('logps', 'old_logps', 'ref_logps', 'entropies')


def padded(made, extra=0):
    """One row per sample."""
    longest = max(len(s['labels']) for s in made) + extra
    batch = {
        'labels': torch.full((len(made), longest), -100),
        'attention_mask': torch.zeros(len(made), longest, dtype=torch.long),
        'position_ids': torch.zeros(len(made), longest, dtype=torch.long),
        **{key: torch.zeros(len(made), longest, dtype=torch.float64) for key in KEYS},
    }
    for row, sample in enumerate(made):
        n = len(sample['labels'])
        batch['labels'][row, :n] = torch.tensor(sample['labels'])
        batch['attention_mask'][row, :n] = 1
        batch['position_ids'][row, :n] = torch.arange(n)
        for key in KEYS:
            batch[key][row, :n] = torch.tensor(sample[key])
    return batch


def packed(made):
    """All samples in one row, positions starting again with each."""
    return {
        'labels': torch.tensor(np.concatenate([s['labels'] for s in made]))[None],
        'attention_mask': torch.ones(1, sum(len(s['labels']) for s in made), dtype=torch.long),
        'position_ids': torch.cat([torch.arange(len(s['labels'])) for s in made])[None],
        **{key: torch.tensor(np.concatenate([s[key] for s in made]))[None] for key in KEYS},
    }


def run(loss, batch, **kwargs):
    """Value, count, and the gradient by the policy's log-probabilities at labelled positions."""
    logps = batch['logps'].clone().requires_grad_(True)
    outputs = {'logps': logps, 'entropies': batch['entropies']}
    inputs = {key: batch[key] for key in ('labels', 'attention_mask', 'position_ids', 'ref_logps', 'old_logps')}
    result = loss({**inputs, **kwargs}, outputs)
    gradient = torch.autograd.grad(result.loss_sum, logps)[0]
    return float(result.loss_sum.detach()), float(result.count), gradient[batch['labels'] != -100]


def sums(made, key='logps'):
    return np.array([s[key].sum() for s in made])


def means(made, key='logps'):
    return np.array([s[key].sum() / (len(s['labels']) - 1) for s in made])


def dpo_reference(made, kind, beta, smoothing, sft):
    ratio = sums(made) - sums(made, 'ref_logps')
    c, r = ratio[0::2], ratio[1::2]
    h = c - r
    losses = {
        'sigmoid': -(1 - smoothing) * np.log(sigmoid(beta * h)) - smoothing * np.log(sigmoid(-beta * h)),
        'hinge': np.maximum(0, 1 - beta * h),
        'ipo': (h - 1 / (2 * beta)) ** 2,
        'kto_pair': 1 - sigmoid(beta * (c - max(r.mean(), 0))) + 1 - sigmoid(beta * (max(c.mean(), 0) - r)),
    }[kind]
    return (losses - sft * means(made)[0::2]).sum()


@settings(deadline=None, max_examples=30)
@given(
    kind=st.sampled_from(['sigmoid', 'hinge', 'ipo', 'kto_pair']),
    beta=st.sampled_from([0.1, 0.5]),
    sft=st.sampled_from([0.0, 0.3]),
    smoothing=st.sampled_from([0.0, 0.2]),
    pairs=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_dpo_equals_the_formula_padded_and_packed(kind, beta, sft, smoothing, pairs, seed):
    """Every kind, with smoothing and the SFT term; pads and packing change nothing."""
    made = samples(2 * pairs, seed=seed)
    smoothing = smoothing if kind == 'sigmoid' else 0.0
    loss = DPOLoss(beta, kind, label_smoothing=smoothing, sft_weight=sft)
    value, count, gradient = run(loss, padded(made))
    assert value == pytest.approx(dpo_reference(made, kind, beta, smoothing, sft), rel=1e-6)
    assert count == pairs
    for batch in (padded(made, extra=3), packed(made)):
        other, other_count, other_gradient = run(loss, batch)
        assert (other, other_count) == (pytest.approx(value, rel=1e-6), count)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-6, atol=1e-9)


def pair(chosen, rejected, ref_chosen=0.0, ref_rejected=0.0):
    """Two samples of one trained token each."""
    batch = {
        'labels': torch.tensor([[-100, 1], [-100, 1]]),
        'attention_mask': torch.ones(2, 2, dtype=torch.long),
        'position_ids': torch.tensor([[0, 1], [0, 1]]),
        'ref_logps': torch.tensor([[0.0, ref_chosen], [0.0, ref_rejected]]),
    }
    return batch, {'logps': torch.tensor([[0.0, chosen], [0.0, rejected]])}


@pytest.mark.parametrize(
    ('loss', 'values', 'expected'),
    [
        (DPOLoss(0.1), (-10, -12, -11, -11.5), 0.620957),
        (DPOLoss(0.1, 'ipo'), (-10, -12, -11, -11.5), 12.25),
        (SimPOLoss(beta=2, gamma=1), (-1, -1.5), 0.693147),
        (ORPOLoss(weight=1.0), (-0.5, -1), 0.320300 + 0.5),
    ],
)
def test_closed_forms_of_preference_losses(loss, values, expected):
    """CASES 19 and its neighbours: known values of known inputs."""
    assert float(loss(*pair(*map(float, values))).loss_sum) == pytest.approx(expected, abs=1e-5)


def test_simpo_cpo_orpo_equal_their_formulas_padded_and_packed():
    """Means and sums over the right tokens, whatever the layout."""
    made = samples(6, seed=3)
    m, s = means(made), sums(made)
    c, r = m[0::2], m[1::2]
    odds = (c - r) - (np.log1p(-np.exp(c)) - np.log1p(-np.exp(r)))
    expected = {
        SimPOLoss(2.0, 0.5): -np.log(sigmoid(2.0 * (c - r) - 0.5)).sum(),
        CPOLoss(0.1, 0.7): (-np.log(sigmoid(0.1 * (s[0::2] - s[1::2]))) - 0.7 * c).sum(),
        ORPOLoss(0.3): (-c - 0.3 * np.log(sigmoid(odds))).sum(),
    }
    for loss, value in expected.items():
        assert run(loss, padded(made))[:2] == (pytest.approx(value, rel=1e-6), 3)
        assert run(loss, packed(made))[:2] == (pytest.approx(value, rel=1e-6), 3)


def policy_reference(made, advantages, kind, eps, eps_high, beta, entropy):
    """Every policy loss, sample by sample, in numpy: the sum and the count."""
    per_sample, tokens = [], 0
    for sample, a in zip(made, advantages, strict=True):
        logp, old, ref, ent = (sample[key][1:] for key in KEYS)
        ratio = np.exp(logp - old)
        if kind == 'gspo':
            ratio = np.full_like(ratio, np.exp((logp - old).mean()))
        if kind == 'sapo':
            tau = 1.0 if a > 0 else 1.05
            token = -4 / tau * sigmoid(tau * (ratio - 1)) * a
        elif kind == 'cispo':
            token = -np.minimum(ratio, 1 + eps_high) * a * logp
        else:
            token = -np.minimum(ratio * a, np.clip(ratio, 1 - eps, 1 + eps_high) * a)
        d = ref - logp
        token = token + beta * (np.exp(d) - d - 1) - entropy * ent
        per_sample.append(token)
        tokens += len(token)
    if kind in ('bnpo', 'ppo', 'cispo'):
        return sum(t.sum() for t in per_sample), tokens
    if kind == 'dr_grpo':
        return sum(t.sum() for t in per_sample) / 50, len(made)
    return sum(t.mean() for t in per_sample), len(made)


POLICY = {
    'grpo': lambda **o: GRPOLoss(**o),
    'bnpo': lambda **o: BNPOLoss(**o),
    'dr_grpo': lambda **o: DRGRPOLoss(50, **o),
    'gspo': lambda **o: GSPOLoss(**o),
    'sapo': lambda **o: SAPOLoss(**o),
    'cispo': lambda **o: CISPOLoss(o.pop('epsilon_high'), **{k: v for k, v in o.items() if k != 'epsilon'}),
    'ppo': lambda **o: PPOLoss(o.pop('epsilon'), **o),
}


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(sorted(POLICY)),
    beta=st.sampled_from([0.0, 0.2]),
    entropy=st.sampled_from([0.0, 0.1]),
    eps_high=st.sampled_from([0.2, 0.35]),
    seed=st.integers(0, 99),
)
def test_policy_losses_equal_their_formulas_padded_and_packed(kind, beta, entropy, eps_high, seed):
    """Value and count of every policy loss; advantages per sample or per token; pads and packing change nothing."""
    made = samples(4, seed=seed)
    advantages = np.random.default_rng(seed).normal(size=4)
    loss = POLICY[kind](epsilon=0.2, epsilon_high=eps_high, beta=beta, entropy_coef=entropy)
    expected, count = policy_reference(made, advantages, kind, 0.2, eps_high, beta, entropy)
    batch = padded(made)
    given_advantages = torch.tensor(advantages)
    value, got, gradient = run(loss, batch, advantages=given_advantages)
    # Advantages are taken as fp32, which bounds the agreement.
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert got == count
    by_token = given_advantages[:, None].expand(batch['labels'].shape)
    for other in (run(loss, batch, advantages=by_token), run(loss, packed(made), advantages=given_advantages)):
        assert other[:2] == (pytest.approx(value, rel=1e-6, abs=1e-9), count)
        torch.testing.assert_close(other[2], gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ('ratio', 'advantage', 'expected'), [(1.5, 1, -1.2), (1.5, -1, 1.5), (0.5, 1, -0.5), (0.5, -1, 0.8)]
)
def test_closed_forms_of_clipping(ratio, advantage, expected):
    """PPO with clip 0.2 at four corners."""
    inputs = {
        'labels': torch.tensor([[1]]),
        'old_logps': torch.zeros(1, 1),
        'advantages': torch.tensor([float(advantage)]),
    }
    result = PPOLoss(0.2)(inputs, {'logps': torch.tensor([[math.log(ratio)]])})
    assert float(result.loss_sum) == pytest.approx(expected, rel=1e-6)


def test_closed_form_of_the_kl_penalty():
    """k3 at logp = ref - 0.5 is e^.5 - .5 - 1 = .148721."""
    inputs = {'labels': torch.tensor([[1]]), 'advantages': torch.zeros(1), 'ref_logps': torch.tensor([[-0.5]])}
    result = GRPOLoss(beta=1.0)(inputs, {'logps': torch.tensor([[-1.0]])})
    assert float(result.loss_sum) == pytest.approx(0.148721, abs=1e-6)


def test_ppo_value_loss_equals_its_formula():
    """The clipped squared error of a value head, beside the surrogate."""
    inputs = {
        'labels': torch.tensor([[1, 2]]),
        'advantages': torch.zeros(1),
        'returns': torch.tensor([[1.0, 0.0]]),
        'old_values': torch.tensor([[0.0, 0.5]]),
    }
    outputs = {'logps': torch.zeros(1, 2), 'values': torch.tensor([[0.5, 0.6]])}
    result = PPOLoss(value_coef=0.5, value_clip=0.2)(inputs, outputs)
    expected = 0.25 * (max(0.25, 0.64) + max(0.36, 0.36))
    assert float(result.loss_sum) == pytest.approx(expected, rel=1e-6)
    assert 'values' in PPOLoss(value_coef=0.5).requires


@pytest.mark.parametrize('beta', [0.0, 0.3, 1.0])
@pytest.mark.parametrize('temperature', [1.0, 2.0])
def test_gkd_equals_the_generalised_divergence(beta, temperature):
    """Against KL sums in float64; -100 counts nothing."""
    student, teacher = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    labels = torch.tensor([[1, 2, -100], [-100, 0, 4]])
    p, q = (x.div(temperature).softmax(-1)[labels != -100].numpy() for x in (teacher, student))
    m = beta * p + (1 - beta) * q
    kl = lambda a, b: (a * np.log(a / b)).sum()  # noqa: E731
    expected = {0.0: kl(p, q), 1.0: kl(q, p)}.get(beta, beta * kl(p, m) + (1 - beta) * kl(q, m))
    result = GKDLoss(beta, temperature)({'labels': labels, 'teacher_logits': teacher}, {'logits': student})
    assert float(result.loss_sum) == pytest.approx(expected, rel=1e-5)
    assert int(result.count) == 4


def test_gkd_of_a_full_top_k_equals_full_logits():
    """With K = V the top-k form is KL(p | q); another beta or no teacher is refused."""
    student, teacher = torch.randn(1, 2, 4), torch.randn(1, 2, 4)
    labels = torch.tensor([[1, 2]])
    logps, ids = teacher.log_softmax(-1).topk(4)
    inputs = {'labels': labels, 'teacher_topk_logps': logps, 'teacher_topk_ids': ids}
    full = GKDLoss(0.0)({'labels': labels, 'teacher_logits': teacher}, {'logits': student})
    assert float(GKDLoss(0.0)(inputs, {'logits': student}).loss_sum) == pytest.approx(float(full.loss_sum), rel=1e-5)
    with pytest.raises(ConfigError, match='beta=0'):
        GKDLoss(0.5)(inputs, {'logits': student})
    with pytest.raises(DataError, match='teacher'):
        GKDLoss()({'labels': labels}, {'logits': student})


@pytest.mark.parametrize(('tau', 'expected'), [(1.0, 0.313262), (0.1, 4.5399e-5)])
def test_closed_form_of_infonce(tau, expected):
    """Two orthonormal pairs."""
    embeddings = torch.eye(2).repeat_interleave(2, 0)
    result = InfonceLoss(tau)({}, {'embeddings': embeddings})
    assert float(result.loss_sum / result.count) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    'options',
    [{}, {'query_query': True}, {'document_document': True}, {'in_batch': False}, {'false_negative_margin': -0.2}],
)
def test_infonce_equals_the_formula(options):
    """Hard negatives, in-batch negatives, query and document blocks, the false-negative mask, in float64."""
    n, hard, tau = 3, 2, 0.2
    embeddings = torch.randn(n * (2 + hard), 6, dtype=torch.float64)
    e = (embeddings / embeddings.norm(dim=-1, keepdim=True)).view(n, 2 + hard, 6).numpy()
    total = 0.0
    for i in range(n):
        q, own = e[i, 0], e[i, 1]
        groups = [e[i, 1:]] if options.get('in_batch') is False else [e[j, 1:] for j in range(n)]
        scores = [q @ d for group in groups for d in group]
        scores += [q @ e[j, 0] for j in range(n) if j != i] if options.get('query_query') else []
        scores += [own @ e[j, 1] for j in range(n) if j != i] if options.get('document_document') else []
        margin = options.get('false_negative_margin')
        if margin is not None:
            scores = [s for s in scores if not s > q @ own + margin]
        # The positive itself always stays.
        rest = [s for s in scores if abs(s - q @ own) > 1e-12]
        total += -np.log(np.exp(q @ own / tau) / (np.exp(q @ own / tau) + np.exp(np.array(rest) / tau).sum()))
    result = InfonceLoss(tau, hard_negatives=hard, **options)({}, {'embeddings': embeddings})
    assert float(result.loss_sum) == pytest.approx(total, rel=1e-5)
    assert float(result.count) == n


def test_advantages_of_groups():
    """GRPO divides by the sample's standard deviation (n - 1), RLOO compares with the others; groups stay apart."""
    grpo = GRPOAdvantage(4, eps=0.0)([1, 0, 1, 0, 2, 2, 2, 2.5])
    assert grpo[:4] == pytest.approx([0.866025, -0.866025, 0.866025, -0.866025], abs=1e-6)
    values = torch.tensor([2, 2, 2, 2.5])
    assert grpo[4:] == pytest.approx(((values - values.mean()) / values.std()).tolist(), rel=1e-6)
    assert GRPOAdvantage(4)([1, 1, 1, 1]) == [0, 0, 0, 0]
    assert GRPOAdvantage(2, scale=False)([1, 0]) == [0.5, -0.5]
    assert RLOOAdvantage(3)([3, 0, 0]) == [3, -1.5, -1.5]
    with pytest.raises(DataError, match='groups'):
        GRPOAdvantage(2)([1, 2, 3])
    with pytest.raises(ConfigError, match='at least 2'):
        RLOOAdvantage(1)


@pytest.mark.parametrize(
    ('call', 'error', 'says'),
    [
        (lambda: DPOLoss(0.0), ConfigError, 'beta'),
        (lambda: DPOLoss(loss_type='nca'), ConfigError, 'kto_pair'),
        (lambda: DPOLoss(loss_type='ipo', label_smoothing=0.1), ConfigError, 'sigmoid'),
        (lambda: DPOLoss()({'labels': torch.ones(2, 1)}, {'logps': torch.ones(2, 1)}), DataError, 'ref_logps'),
        (lambda: SimPOLoss()({'labels': torch.ones(3, 1)}, {'logps': torch.ones(3, 1)}), DataError, 'odd'),
        (lambda: GRPOLoss(epsilon=-1), ConfigError, 'epsilon'),
        (lambda: GRPOLoss()({'labels': torch.ones(1, 1)}, {'logps': torch.ones(1, 1)}), DataError, 'advantages'),
        (lambda: GRPOLoss(beta=1)({'labels': torch.ones(1, 1), 'advantages': [1.0]}, {'logps': torch.ones(1, 1)}), DataError, 'ref_logps'),
        (lambda: GRPOLoss()({'labels': torch.ones(2, 1), 'advantages': [1.0] * 3}, {'logps': torch.ones(2, 1)}), DataError, 'advantages'),
        (lambda: DRGRPOLoss(0), ConfigError, 'max_completion_length'),
        (lambda: SAPOLoss(tau_pos=0), ConfigError, 'tau_pos'),
        (lambda: GKDLoss(2), ConfigError, 'beta'),
        (lambda: InfonceLoss(0), ConfigError, 'temperature'),
        (lambda: InfonceLoss()({}, {'embeddings': torch.ones(3, 2)}), DataError, 'groups of 2'),
    ],
)  # fmt: skip
def test_bad_options_and_inputs_are_refused(call, error, says):
    """Each names the value and the rule."""
    with pytest.raises(error, match=says):
        call()


def test_gkd_weighs_tokens():
    """`loss_weights` multiply each token's divergence and are what is counted."""
    student, teacher = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    labels = torch.tensor([[1, 2, -100], [-100, 0, 4]])
    weights = torch.tensor([[0.5, 0.0, 9.0], [9.0, 2.0, 1.0]])
    result = GKDLoss(0.3)({'labels': labels, 'teacher_logits': teacher, 'loss_weights': weights}, {'logits': student})
    total = 0.0
    for row, column in ((0, 0), (0, 1), (1, 1), (1, 2)):
        one = torch.full_like(labels, -100)
        one[row, column] = 1
        alone = GKDLoss(0.3)({'labels': one, 'teacher_logits': teacher}, {'logits': student})
        total += float(alone.loss_sum) * float(weights[row, column])
    assert float(result.loss_sum) == pytest.approx(total, rel=1e-5)
    assert float(result.count) == 3.5


@pytest.mark.parametrize('beta', [0.0, 0.5, 1.0])
def test_gkd_takes_a_vocabulary_with_ruled_out_entries(beta):
    """Entries at minus infinity on both sides add nothing: no NaN in value or gradient."""
    student, teacher = torch.randn(1, 2, 5), torch.randn(1, 2, 5)
    labels = torch.tensor([[1, 2]])
    expected = GKDLoss(beta)({'labels': labels, 'teacher_logits': teacher}, {'logits': student})
    ruled_out = torch.full((1, 2, 2), float('-inf'))
    wider = torch.cat([student, ruled_out], -1).requires_grad_()
    inputs = {'labels': labels, 'teacher_logits': torch.cat([teacher, ruled_out], -1)}
    result = GKDLoss(beta)(inputs, {'logits': wider})
    assert float(result.loss_sum.detach()) == pytest.approx(float(expected.loss_sum), rel=1e-5)
    assert torch.isfinite(torch.autograd.grad(result.loss_sum, wider)[0]).all()
