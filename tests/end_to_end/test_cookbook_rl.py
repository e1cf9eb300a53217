"""The cookbook's scripts of preferences, rewards and distillation, on a tiny random model: steps, logs, files and verdicts."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.helpers.cookbook import load_script, logged, tiny_chat_dir

ADAPTER_FILES = {'adapter_config.json', 'adapter_model.safetensors'}


@pytest.fixture(scope='module')
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model with a tokenizer."""
    pytest.importorskip('twinkle_hf')
    return tiny_chat_dir(tmp_path_factory.mktemp('tiny'))


def script(name: str) -> ModuleType:
    """A script of the cookbook, or a skipped test where reasoning-gym is not installed."""
    pytest.importorskip('twinkle_hf')
    if name != 'gkd':
        pytest.importorskip('reasoning_gym')
    return load_script(name)


def files(folder: Path) -> set[str]:
    """The names in a folder."""
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize('name', ['dpo', 'gkd', 'grpo'])
def test_help_lists_the_options(name, capsys):
    """`--help` tells what can be changed, and numbers below one are refused."""
    module = script(name)
    with pytest.raises(SystemExit):
        module.parse(['--help'])
    printed = capsys.readouterr().out
    assert all(f'--{option}' in printed for option in ('model', 'output-dir', 'lr', 'rank', 'seed'))
    assert 'smollm2://135m-instruct' in printed
    with pytest.raises(SystemExit):
        module.parse(['--rank', '0'])
    assert 'argument --rank: 0 is less than 1' in capsys.readouterr().err


# -- dpo -----------------------------------------------------------------------------------------------------------------


def test_dpo_pairs_are_right_and_wrong():
    """Chosen and rejected in turn, of one question; the rejected one has the same letters in another order."""
    rows = script('dpo').make_pairs(20, 6, seed=3)
    assert len(rows) == 40
    for chosen, rejected in zip(rows[0::2], rows[1::2], strict=True):
        (question, right), (same_question, wrong) = chosen['messages'], rejected['messages']
        assert question == same_question
        word = question['content'].split()[-1]
        assert right['content'] == word[::-1]
        assert wrong['content'] != right['content']
        assert sorted(wrong['content']) == sorted(word)


def test_dpo_runs_and_margins_of_trained_pairs_rise(tiny, tmp_path, capsys):
    """As many steps as batches; before training nothing differs from the reference; the margin of the last steps is above 0."""
    module = script('dpo')
    sizes = ['--pairs', '64', '--held-out', '16', '--batch-size', '8']
    code = module.main(['--model', tiny, '--output-dir', str(tmp_path), *sizes, '--lr', '1e-2', '--beta', '0.5'])
    printed = capsys.readouterr().out
    numbers = logged(tmp_path)
    pairs = int(re.search(r'^(\d+) pairs to train on', printed, re.MULTILINE).group(1))
    assert 48 <= pairs <= 64
    assert [entry['step'] for entry in numbers] == list(range(1, math.ceil(pairs / 8) + 1))
    assert numbers[0]['loss'] == pytest.approx(math.log(2), abs=1e-6)
    assert numbers[0]['reward_margin'] == 0
    assert numbers[-1]['reward_margin'] == pytest.approx(
        numbers[-1]['chosen_rewards'] - numbers[-1]['rejected_rewards']
    )
    assert all(math.isfinite(value) for entry in numbers for value in entry.values() if isinstance(value, float))
    before, after = re.search(r'^reward_margin\s+(\S+)\s+(\S+)$', printed, re.MULTILINE).groups()
    assert float(before) == 0
    assert code == (1 if 'PROBLEM' in printed else 0)
    assert (code == 0) == (not module.check(*(_table(printed, column) for column in (0, 1))))
    assert float(after) != 0
    assert files(tmp_path / 'last') >= ADAPTER_FILES


def _table(printed: str, column: int) -> dict[str, float]:
    """The numbers that dpo.py prints of held-out pairs, before (0) or after (1)."""
    rows = re.findall(r'^(reward_accuracy|reward_margin)\s+(\S+)\s+(\S+)$', printed, re.MULTILINE)
    return {key: float(values[column]) for key, *values in rows}


@pytest.mark.parametrize(
    ('accuracy', 'margin', 'problem'),
    [
        (0.9, 0.5, None),
        (0.55, 0.5, 'guessing gives 0.5'),
        (0.9, -0.1, 'margin did not rise'),
        (math.nan, 0.5, 'accuracy'),
    ],
)
def test_dpo_verdict(accuracy, margin, problem):
    """Good is: held-out pairs told apart better than by guessing, and a margin that rose."""
    problems = script('dpo').check({'reward_margin': 0.0}, {'reward_accuracy': accuracy, 'reward_margin': margin})
    assert problems == [] if problem is None else any(problem in text for text in problems)


# -- gkd -----------------------------------------------------------------------------------------------------------------


def test_gkd_student_is_a_layer_short_and_comes_nearer(tiny, tmp_path, capsys):
    """Of two layers one is left; 72 rows in batches of 8 for 3 epochs are 27 steps; the divergence of held-out rows falls: exit 0."""
    from transformers import AutoConfig

    module = script('gkd')
    arguments = ['--model', tiny, '--output-dir', str(tmp_path), '--epochs', '3', '--lr', '1e-2', '--top-k', '128']
    assert module.main(arguments) == 0
    printed = capsys.readouterr().out
    before, after = map(float, re.search(r'held-out rows: (\S+) -> (\S+) in 27 steps', printed).groups())
    assert 0 < after < 0.9 * before
    assert [entry['step'] for entry in logged(tmp_path)] == list(range(1, 28))
    assert AutoConfig.from_pretrained(tmp_path / 'student').num_hidden_layers == 1
    assert files(tmp_path / 'last') >= ADAPTER_FILES


def test_gkd_student_that_is_the_teacher_has_nothing_to_learn(tiny, tmp_path, capsys):
    """The divergence is 0 from the start, which is no success: exit 1."""
    module = script('gkd')
    arguments = ['--model', tiny, '--student', tiny, '--output-dir', str(tmp_path), '--epochs', '1', '--lr', '0']
    assert module.main(arguments) == 1
    assert 'from 0.000 to 0.000 only: nothing was learned' in capsys.readouterr().out


def test_gkd_refuses_sizes_that_leave_nothing(tiny, tmp_path):
    """No layer left, or no row to train on."""
    module = script('gkd')
    with pytest.raises(SystemExit, match='the teacher has 2'):
        module.cut_student(tiny, 2, tmp_path)
    options = module.parse(['--held-out', '88'])
    with pytest.raises(SystemExit, match='has 88 rows'):
        module.load_data(SimpleNamespace(**vars(options)))


# -- grpo ----------------------------------------------------------------------------------------------------------------


def test_grpo_answers_end_at_the_stop_text():
    """A token that completes the stop text, or ends the text, is the last of an answer; without one all are kept."""
    from tests.helpers.tokenizers import tiny_tokenizer
    from twinkle.template import Template

    module = script('grpo')
    template = Template(tokenizer=tiny_tokenizer())
    tokens = template.tokenizer.encode('7\n8\n', add_special_tokens=False)
    end = template.tokenizer.eos_token_id
    assert template.decode(module.cut(tokens, template, ('\n',))) == '7\n'
    assert module.cut(tokens, template, ()) == tokens
    assert module.cut([tokens[0], end, *tokens], template, ('\n',)) == [tokens[0], end]
    assert module.cut([end], template, ('\n',)) == [end]


def test_grpo_rows_are_labelled_on_answers_only():
    """Labels are shifted once: the prompt's last place has the answer's first token as its target."""
    row = script('grpo').feature([1, 2, 3], [4, 5], 0.5, -1.0)
    assert row == {
        'input_ids': [1, 2, 3, 4, 5],
        'labels': [-100, -100, 4, 5, -100],
        'rewards': 0.5,
        'advantages': -1.0,
    }


def test_grpo_samples_groups_from_the_weights_that_are_trained(tiny, tmp_path):
    """Prompts of different lengths, padded on the left: greedy answers are those that each prompt gets alone, adapter included."""
    import torch
    from peft import LoraConfig

    from twinkle.data_format import SamplingParams
    from twinkle.model import TransformersModel
    from twinkle.template import Template

    module = script('grpo')
    torch.manual_seed(1)
    model = TransformersModel(tiny, mixed_precision='no')
    template = Template(tiny)
    prompts = [
        template.tokenizer.encode(text, add_special_tokens=False) for text in ('1+2=', 'a much longer one, 3+4=')
    ]
    greedy = SamplingParams(max_tokens=6, temperature=0.0, stop=('\n',))
    base = module.sample(model.model, template, prompts, greedy)
    lora = LoraConfig(r=4, target_modules='all-linear', init_lora_weights=False, task_type='CAUSAL_LM')
    model.add_adapter_to_model('grpo', lora)
    together = module.sample(model.model, template, prompts, greedy)
    assert together == [module.sample(model.model, template, [prompt], greedy)[0] for prompt in prompts]
    assert together != base
    four = module.sample(model.model, template, prompts, SamplingParams(max_tokens=3, num_samples=2))
    assert len(four) == 4
    assert all(1 <= len(answer) <= 3 for answer in four)


def test_grpo_runs_exactly_as_many_steps_as_asked(tiny, tmp_path, capsys):
    """3 rounds of 2 updates: the log has 3 lines with finite numbers and a reward; the first update's ratio is 1; exit 1."""
    from matplotlib.image import imread

    module = script('grpo')
    sizes = ['--steps', '3', '--updates', '2', '--prompts', '2', '--group', '4', '--max-tokens', '4', '--fixed', '5']
    code = module.main(['--model', tiny, '--output-dir', str(tmp_path), *sizes, '--save-plot'])
    printed = capsys.readouterr().out
    numbers = logged(tmp_path, 'reward')
    assert [entry['step'] for entry in numbers] == [2, 4, 6]
    assert all(math.isfinite(value) for entry in numbers for value in entry.values() if isinstance(value, float))
    assert all(0 <= entry['reward'] <= 1 and 1 <= entry['completion_length'] <= 4 for entry in numbers)
    assert numbers[0]['ratio'] == pytest.approx(1, abs=1e-2)
    first, last = numbers[0]['reward'], numbers[-1]['reward']
    assert f'{first:.3f} in the first, {last:.3f} in the last of 3.' in printed
    before, after = map(float, re.search(r'of 5 fixed questions: (\S+) -> (\S+)\.$', printed, re.MULTILINE).groups())
    assert code == (1 if module.check(before, after) else 0)
    assert files(tmp_path / 'last') >= ADAPTER_FILES
    assert imread(tmp_path / 'reward.png').shape[:2] == (600, 1050)


def test_grpo_learns_what_is_rewarded(tiny, tmp_path, monkeypatch, capsys):
    """With a scorer that likes small letters at the start, the tiny random model comes to begin with one: exit 0."""
    import reasoning_gym
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        module.lm_head.weight.mul_(5)  # else its frozen head cannot tell tokens apart by more than a few nats
    module.save_pretrained(tmp_path / 'sharper')
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / 'sharper')

    class Letters:
        """Sums whose reward is for beginning with a small letter."""

        def __getitem__(self, index: int) -> dict[str, object]:
            return {'metadata': {'expression': f'{index % 9} + 1'}}

        def score_answer(self, answer: str, entry: object) -> float:
            return float(answer[:1].isascii() and answer[:1].islower())

    monkeypatch.setattr(reasoning_gym, 'create_dataset', lambda *args, **kwargs: Letters())
    module = script('grpo')
    sizes = ['--steps', '40', '--prompts', '4', '--group', '8', '--max-tokens', '2', '--lr', '1e-2']
    assert module.main(['--model', str(tmp_path / 'sharper'), '--output-dir', str(tmp_path), *sizes]) == 0
    before, after = re.search(r'fixed questions: (\S+) -> (\S+)\.$', capsys.readouterr().out, re.MULTILINE).groups()
    assert float(after) > float(before) + 0.3


@pytest.mark.parametrize(('before', 'after', 'learned'), [(0.3, 0.6, True), (0.3, 0.32, False), (0.3, 0.1, False)])
def test_grpo_verdict(before, after, learned):
    """Good is: 0.05 more of mean reward, at least; not a number is not good."""
    module = script('grpo')
    assert (module.check(before, after) == []) == learned
    assert module.check(before, math.nan)
