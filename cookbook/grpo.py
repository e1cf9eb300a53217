"""Learn from rewards: GRPO on sums that reasoning-gym makes and scores. A few minutes on a laptop's CPU.

    pip install reasoning-gym
    python cookbook/grpo.py
    python cookbook/grpo.py --steps 60 --digits 2 --save-plot

Each step asks some questions, samples a group of answers to each from the very weights that are trained, lets the task's own scorer
judge them, and makes answers above their group's mean likelier. The mean reward of some fixed questions is measured before and after.
Exits 1 if it did not rise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tqdm import tqdm

from twinkle import DeviceMesh, initialize
from twinkle.advantage import GRPOAdvantage
from twinkle.data_format import IGNORE_INDEX, SamplingParams
from twinkle.metric import CompletionRewardMetric, GRPOMetric
from twinkle.model import TransformersModel
from twinkle.template import Template

SHOTS = '3+4=7\n9-2=7\n1-6=-5\n'
STOP = ('\n',)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; `--help` lists them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--model', default='smollm2://135m-instruct', help='a folder, hf://org/name, ... (default: %(default)s)'
    )
    parser.add_argument('--output-dir', default='output/grpo', help='where the adapter, the log and the plot go')
    parser.add_argument('--steps', type=positive, default=30, help='rounds of sampling (default: %(default)s)')
    parser.add_argument('--updates', type=positive, default=2, help='optimizer steps per round (default: %(default)s)')
    parser.add_argument('--prompts', type=positive, default=8, help='questions per round (default: %(default)s)')
    parser.add_argument('--group', type=positive, default=4, help='answers per question (default: %(default)s)')
    parser.add_argument('--fixed', type=positive, default=32, help='questions to measure with (default: %(default)s)')
    parser.add_argument('--digits', type=positive, default=1, help='of the numbers, at most (default: %(default)s)')
    parser.add_argument('--max-tokens', type=positive, default=5, help='of an answer (default: %(default)s)')
    parser.add_argument('--lr', type=float, default=5e-4)
    parser.add_argument('--rank', type=positive, default=16, help='of LoRA')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--save-plot', action='store_true', help='draw the rewards as reward.png (needs matplotlib)')
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text} is less than 1')
    return number


def sample(module: Any, template: Template, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """`params.num_samples` answers to each prompt, in turn, as tokens up to the stop text, which is left in."""
    width = max(map(len, prompts))
    pad = template.pad_token_id
    ids = torch.tensor([[pad] * (width - len(one)) + one for one in prompts], device=module.device)
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts], device=module.device)
    module.eval()
    with torch.no_grad():
        out = module.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=params.temperature > 0,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            max_new_tokens=params.max_tokens,
            num_return_sequences=params.num_samples,
            pad_token_id=pad,
        )
    return [cut(tokens, template, params.stop) for tokens in out[:, width:].tolist()]


def cut(tokens: list[int], template: Template, stop: tuple[str, ...]) -> list[int]:
    """The tokens up to the first that ends the text or completes a stop text."""
    for end in range(1, len(tokens) + 1):
        ended = tokens[end - 1] == template.tokenizer.eos_token_id
        if ended or any(text in template.decode(tokens[:end]) for text in stop):
            return tokens[:end]
    return tokens


def feature(prompt: list[int], answer: list[int], reward: float, advantage: float) -> dict[str, Any]:
    """A row: labels are the next tokens, of the answer only."""
    ids = prompt + answer
    labels = [IGNORE_INDEX] * (len(prompt) - 1) + answer + [IGNORE_INDEX]
    return {'input_ids': ids, 'labels': labels, 'rewards': float(reward), 'advantages': advantage}


def answer(
    model: TransformersModel, template: Template, task: Any, indices: Sequence[int], params: SamplingParams
) -> list[tuple[list[int], list[int], float]]:
    """Prompt, answer and reward, of `params.num_samples` answers to each question in turn."""
    prompts = [template.tokenizer.encode(ask(task[index]), add_special_tokens=False) for index in indices]
    answers = sample(model.model, template, prompts, params)
    result = []
    for number, tokens in enumerate(answers):
        owner = number // params.num_samples
        text = template.decode(tokens, skip_special_tokens=True).strip()
        result.append((prompts[owner], tokens, float(task.score_answer(text, task[indices[owner]]))))
    return result


def ask(entry: dict[str, Any]) -> str:
    """The question, behind some sums that show how to answer."""
    return SHOTS + entry['metadata']['expression'].replace(' ', '') + '='


def train(
    model: TransformersModel, template: Template, task: Any, options: argparse.Namespace, run: Any
) -> list[float]:
    """The loop. Returns the mean reward of every round."""
    params = SamplingParams(max_tokens=options.max_tokens, stop=STOP, num_samples=options.group)
    advantage = GRPOAdvantage(options.group)
    history: list[float] = []
    with tqdm(total=options.steps, desc='Training', unit='step') as bar:
        for step in range(options.steps):
            asked = range(step * options.prompts, (step + 1) * options.prompts)
            answers = answer(model, template, task, asked, params)
            advantages = advantage([reward for *_, reward in answers])
            rows = [feature(*one, value) for one, value in zip(answers, advantages, strict=True)]
            # Under the weights that sampled: from the second update on, the policy is another one.
            old = model.forward_only(rows, return_outputs=('logps',))['logps']
            for _ in range(options.updates):
                model.forward_backward(inputs=rows, old_logps=old)
                model.clip_grad_and_step()
            numbers = model.calculate_metric()
            run.log(numbers, step=int(numbers['step']))
            history.append(numbers['reward'])
            bar.update()
            keys = ('reward', 'completion_length', 'clip_fraction')
            bar.set_postfix({key: f'{numbers[key]:.3f}' for key in keys})
    return history


def evaluate(model: TransformersModel, template: Template, task: Any, options: argparse.Namespace) -> float:
    """The mean reward of four answers to each of the fixed questions, the last ones of the task."""
    params = SamplingParams(max_tokens=options.max_tokens, stop=STOP, num_samples=4)
    first = options.steps * options.prompts
    answers = answer(model, template, task, range(first, first + options.fixed), params)
    return sum(reward for *_, reward in answers) / len(answers)


def draw(rewards: list[float], before: float, after: float, path: Path) -> None:
    """The rewards as a PNG."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(range(1, len(rewards) + 1), rewards, linewidth=1, label='of each step')
    axes.plot([0, len(rewards)], [before, after], 'o', label='of fixed questions')
    axes.set(xlabel='step', ylabel='mean reward', title='GRPO on sums')
    axes.legend()
    axes.grid(alpha=0.3)
    axes.set_ylim(0, 1)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Sample, score, train, tell."""
    import reasoning_gym

    options = parse(arguments)
    output_dir = Path(options.output_dir)
    start = time.time()
    mesh = DeviceMesh.from_sizes(world_size=1)
    with initialize(seed=options.seed, output_dir=output_dir, global_device_mesh=mesh, config=vars(options)) as run:
        sums = {'min_terms': 2, 'max_terms': 2, 'min_digits': 1, 'max_digits': options.digits}
        task = reasoning_gym.create_dataset(
            'chain_sum', size=options.steps * options.prompts + options.fixed, seed=options.seed, **sums
        )
        model = TransformersModel(model_id=options.model, mixed_precision='no' if mesh.device_type == 'cpu' else 'bf16')
        template = Template(options.model)
        lora = LoraConfig(
            r=options.rank, lora_alpha=2 * options.rank, target_modules='all-linear', task_type='CAUSAL_LM'
        )
        model.add_adapter_to_model('grpo', lora)
        with model.adapter('grpo'):
            model.set_template(template)
            model.set_loss('grpo')
            model.add_metric(GRPOMetric)
            model.add_metric(CompletionRewardMetric)
            model.set_optimizer('default', lr=options.lr)
            steps = options.steps * options.updates
            model.set_lr_scheduler('default', num_warmup_steps=max(1, steps // 10), num_training_steps=steps)
            before = evaluate(model, template, task, options)
            rewards = train(model, template, task, options, run)
            after = evaluate(model, template, task, options)
            adapter = model.save('last', output_dir=output_dir)

    print(f'Mean reward of each step: {rewards[0]:.3f} in the first, {rewards[-1]:.3f} in the last of {len(rewards)}.')
    print(f'Mean reward of {options.fixed} fixed questions: {before:.3f} -> {after:.3f}.')
    print(f'{time.time() - start:.0f} s in all.\nAdapter: {adapter}\nLog: {output_dir / "metrics.jsonl"}')
    if options.save_plot:
        draw(rewards, before, after, output_dir / 'reward.png')
        print(f'Plot: {output_dir / "reward.png"}')
    problems = check(before, after)
    for problem in problems:
        print(f'PROBLEM: {problem}')
    return 1 if problems else 0


def check(before: float, after: float) -> list[str]:
    """What went wrong, if anything."""
    if after > before + 0.05:
        return []
    return [f'the mean reward went from {before:.3f} to {after:.3f} only: nothing was learned']


if __name__ == '__main__':
    raise SystemExit(main())
