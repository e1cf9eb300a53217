"""Prefer right answers to wrong ones: LoRA and DPO on words to spell backward, which reasoning-gym makes and scores. A few minutes on a laptop's CPU.

    pip install reasoning-gym
    python cookbook/dpo.py
    python cookbook/dpo.py --pairs 512 --beta 0.3 --letters 8

Rows hold a right and a wrong answer to the same question in turn. The reference is the model with its adapter disabled. It measures
held-out pairs before and after: how often the right answer is the likelier one, and DPO's own reward accuracy and margin. Exits 1 if
they did not rise.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

from peft import LoraConfig
from tqdm import tqdm

from twinkle import DeviceMesh, initialize
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.metric import DPOMetric
from twinkle.model import TransformersModel


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; `--help` lists them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--model', default='smollm2://135m-instruct', help='a folder, hf://org/name, ... (default: %(default)s)'
    )
    parser.add_argument('--output-dir', default='output/dpo', help='where the adapter and the log go')
    parser.add_argument('--letters', type=positive, default=5, help='of a word, at most (default: %(default)s)')
    parser.add_argument('--pairs', type=positive, default=320, help='to train on (default: %(default)s)')
    parser.add_argument('--held-out', type=positive, default=64, help='pairs to measure with (default: %(default)s)')
    parser.add_argument('--batch-size', type=positive, default=8, help='pairs per step (default: %(default)s)')
    parser.add_argument('--beta', type=float, default=0.1, help='of DPO (default: %(default)s)')
    parser.add_argument('--lr', type=float, default=5e-4)
    parser.add_argument('--rank', type=positive, default=16, help='of LoRA')
    parser.add_argument('--seed', type=int, default=0)
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text} is less than 1')
    return number


def make_pairs(count: int, letters: int, seed: int) -> list[dict[str, Any]]:
    """Rows of messages, chosen and rejected in turn: the scorer gives the one 1, and the other, the letters in another order, less."""
    import reasoning_gym

    task = reasoning_gym.create_dataset('spell_backward', size=count, seed=seed, min_word_len=3, max_word_len=letters)
    dice = random.Random(seed)
    rows = []
    for entry in task:
        right = wrong = entry['answer'].lower()
        if len(set(right)) == 1:  # no other order
            continue
        while task.score_answer(wrong, entry) == 1:
            wrong = ''.join(dice.sample(right, len(right)))
        question = {'role': 'user', 'content': entry['question'].lower()}
        rows += [{'messages': [question, {'role': 'assistant', 'content': text}]} for text in (right, wrong)]
    return rows


def load_data(rows: list[dict[str, Any]], options: argparse.Namespace) -> DataLoader:
    """Encoded rows in batches of whole pairs, which are shuffled as one."""
    dataset = Dataset(DatasetMeta(rows))
    dataset.set_template('default', model_id=options.model, max_length=128, system='Answer with one word.')
    dataset.encode()
    return DataLoader(dataset, batch_size=2 * options.batch_size, shuffle=True, seed=options.seed, rows_together=2)


def train(model: TransformersModel, dataloader: DataLoader, run: Any) -> list[dict[str, float]]:
    """The loop. The loss asks for the reference's log-probabilities, and the model adds them. Returns the numbers of every step."""
    history: list[dict[str, float]] = []
    with tqdm(total=len(dataloader), desc='Training', unit='step') as bar:
        for batch in dataloader:
            model.forward_backward(inputs=batch)
            model.clip_grad_and_step()
            numbers = model.calculate_metric()
            run.log(numbers, step=int(numbers['step']))
            history.append(numbers)
            bar.update()
            shown = {key: f'{numbers[key]:.3f}' for key in ('loss', 'reward_margin', 'reward_accuracy')}
            bar.set_postfix(shown)
    return history


def evaluate(model: TransformersModel, dataloader: DataLoader) -> dict[str, float]:
    """DPO's numbers on held-out pairs, and `preferred`: how often the right answer is the likelier one."""
    likelier = pairs = 0
    for batch in dataloader:
        reference = model.forward_only(batch, disable_lora=True, return_outputs=('logps',))['logps']
        sums = model.forward_only(batch, return_outputs=('logps',))['logps'].sum(
            -1
        )  # logps are 0 where nothing is trained
        likelier += int((sums[0::2] > sums[1::2]).sum())
        pairs += len(sums) // 2
        model.forward_only(batch, return_logits=False, ref_logps=reference)
    return {**model.calculate_metric(is_training=False), 'preferred': likelier / pairs}


def main(arguments: list[str] | None = None) -> int:
    """Make pairs, measure, train, measure again."""
    options = parse(arguments)
    start = time.time()
    mesh = DeviceMesh.from_sizes(world_size=1)
    with initialize(
        seed=options.seed, output_dir=options.output_dir, global_device_mesh=mesh, config=vars(options)
    ) as run:
        rows = make_pairs(options.pairs + options.held_out, options.letters, options.seed)
        test = rows[-2 * options.held_out :]
        asked = {row['messages'][0]['content'] for row in test}
        training = [row for row in rows[: 2 * options.pairs] if row['messages'][0]['content'] not in asked]
        dataloader, held_out = load_data(training, options), load_data(test, options)
        print(
            f'{len(training) // 2} pairs to train on; none of them asks what the {options.held_out} held-out pairs ask.'
        )

        model = TransformersModel(model_id=options.model, mixed_precision='no' if mesh.device_type == 'cpu' else 'bf16')
        lora = LoraConfig(
            r=options.rank, lora_alpha=2 * options.rank, target_modules='all-linear', task_type='CAUSAL_LM'
        )
        model.add_adapter_to_model('dpo', lora)
        model.set_loss('dpo', beta=options.beta)
        model.add_metric(DPOMetric)
        steps = len(dataloader)
        model.set_optimizer('default', lr=options.lr)
        model.set_lr_scheduler('default', num_warmup_steps=max(1, steps // 10), num_training_steps=steps)
        before = evaluate(model, held_out)
        train(model, dataloader, run)
        after = evaluate(model, held_out)
        adapter = model.save('last', output_dir=options.output_dir)

    print(f'\nheld-out pairs{"before":>17}{"after":>10}')
    for key in ('preferred', 'reward_accuracy', 'reward_margin', 'chosen_rewards', 'rejected_rewards', 'loss'):
        print(f'{key:<20}{before[key]:>11.3f}{after[key]:>10.3f}')
    print(f'\n{steps} steps; {time.time() - start:.0f} s in all.')
    print(f'Adapter: {adapter}\nLog: {Path(options.output_dir) / "metrics.jsonl"}')
    problems = check(before, after)
    for problem in problems:
        print(f'PROBLEM: {problem}')
    return 1 if problems else 0


def check(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """What went wrong, if anything."""
    problems = []
    if not after['reward_accuracy'] > 0.6:
        problems.append(f'the reward accuracy of held-out pairs is {after["reward_accuracy"]:.2f}; guessing gives 0.5')
    if not after['reward_margin'] > before['reward_margin']:
        problems.append(
            f'the reward margin did not rise: {before["reward_margin"]:.3f} -> {after["reward_margin"]:.3f}'
        )
    return problems


if __name__ == '__main__':
    raise SystemExit(main())
