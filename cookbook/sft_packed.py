"""The same lesson as sft.py with packed rows: several conversations in each row, instead of pads. A few minutes on a laptop's CPU.

    python cookbook/sft_packed.py
    python cookbook/sft_packed.py --packing-length 512 --epochs 6

It counts what padding would have cost, trains on the packs, and tells the loss before and after. Exits 1 if the loss did not go down.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from peft import LoraConfig
from tqdm import tqdm

from twinkle import DeviceMesh, initialize
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta, PackingDataset
from twinkle.model import TransformersModel

HERE = Path(__file__).parent


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; `--help` lists them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--model', default='smollm2://135m-instruct', help='a folder, hf://org/name, ... (default: %(default)s)'
    )
    parser.add_argument('--data', default=str(HERE / 'data' / 'self_cognition.jsonl'), help='rows of messages, jsonl')
    parser.add_argument('--output-dir', default='output/sft_packed', help='where the adapter and the log go')
    parser.add_argument('--name', default='Twinkle', help='the name to teach (default: %(default)s)')
    parser.add_argument('--author', default='the Twinkle team', help='the makers to teach (default: %(default)s)')
    parser.add_argument('--packing-length', type=positive, default=256, help='tokens of a row (default: %(default)s)')
    parser.add_argument('--batch-size', type=positive, default=2, help='packed rows per step (default: %(default)s)')
    parser.add_argument('--epochs', type=positive, default=3)
    parser.add_argument('--steps', type=positive, help='optimizer steps, at most (default: all of the epochs)')
    parser.add_argument('--lr', type=float, default=1e-3)
    parser.add_argument('--rank', type=positive, default=8, help='of LoRA')
    parser.add_argument('--seed', type=int, default=0)
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text} is less than 1')
    return number


def load_data(options: argparse.Namespace, *, packed: bool) -> Dataset:
    """Rows with the name filled in, encoded for the model, and packed if asked for."""
    meta = DatasetMeta(options.data)
    dataset = PackingDataset(meta, packing_length=options.packing_length) if packed else Dataset(meta)
    dataset.map('self_cognition', name=options.name, author=options.author)
    dataset.set_template('default', model_id=options.model, max_length=options.packing_length)
    dataset.encode()
    return dataset


def cost(dataloader: DataLoader) -> tuple[int, int]:
    """Tokens of an epoch, and the places that its batches take with the padding among them."""
    tokens = places = 0
    for batch in dataloader:
        lengths = [len(row['input_ids']) for row in batch]
        tokens += sum(lengths)
        places += len(lengths) * max(lengths)
    return tokens, places


def compare(plain: Dataset, packed: Dataset, options: argparse.Namespace) -> tuple[float, float]:
    """Print what padding takes with and without packing, at about as many tokens in a batch. Returns both shares."""
    per_pack = max(1, round(len(plain) / len(packed)))
    shares = []
    for title, dataset, size in (
        ('padded', plain, options.batch_size * per_pack),
        ('packed', packed, options.batch_size),
    ):
        loader = DataLoader(dataset, batch_size=size, shuffle=True, seed=options.seed)
        tokens, places = cost(loader)
        shares.append(1 - tokens / places)
        print(
            f'{title}: {len(dataset)} rows, {len(loader)} batches of {size}; {tokens} tokens in {places} places, '
            f'{shares[-1]:.1%} padding'
        )
    return shares[0], shares[1]


def train(model: TransformersModel, dataloader: DataLoader, epochs: int, steps: int, run: Any) -> list[float]:
    """The loop. Returns the loss of every step."""
    losses: list[float] = []
    with tqdm(total=steps, desc='Training', unit='step') as bar:
        for _ in range(epochs):
            for batch in dataloader:
                model.forward_backward(inputs=batch)
                model.clip_grad_and_step()
                numbers = model.calculate_metric()
                run.log(numbers, step=int(numbers['step']))
                losses.append(numbers['loss'])
                bar.update()
                bar.set_postfix(loss=f'{losses[-1]:.3f}', speed=f'{numbers["tokens_per_second"]:.0f} tokens/s')
                if len(losses) == steps:
                    return losses
    return losses


def evaluate(model: TransformersModel, dataloader: DataLoader) -> float:
    """The loss per token over all rows, without training."""
    for batch in dataloader:
        model.forward_only(batch, return_logits=False)
    return model.calculate_metric(is_training=False)['loss']


def main(arguments: list[str] | None = None) -> int:
    """Pack, compare, train, tell."""
    options = parse(arguments)
    start = time.time()
    mesh = DeviceMesh.from_sizes(world_size=1)
    with initialize(
        seed=options.seed, output_dir=options.output_dir, global_device_mesh=mesh, config=vars(options)
    ) as run:
        dataset = load_data(options, packed=True)
        padded, packed = compare(load_data(options, packed=False), dataset, options)
        dataloader = DataLoader(dataset, batch_size=options.batch_size, shuffle=True, seed=options.seed)
        steps = len(dataloader) * options.epochs
        steps = steps if options.steps is None else min(steps, options.steps)

        model = TransformersModel(model_id=options.model, mixed_precision='no' if mesh.device_type == 'cpu' else 'bf16')
        lora = LoraConfig(
            r=options.rank, lora_alpha=2 * options.rank, target_modules='all-linear', task_type='CAUSAL_LM'
        )
        model.add_adapter_to_model('sft', lora)
        model.set_template(dataset.template)
        model.set_optimizer('default', lr=options.lr)
        model.set_lr_scheduler('default', num_warmup_steps=max(1, steps // 10), num_training_steps=steps)
        before = evaluate(model, dataloader)
        train(model, dataloader, options.epochs, steps, run)
        after = evaluate(model, dataloader)
        adapter = model.save('last', output_dir=options.output_dir)

    print(f'Padding {padded:.1%} -> {packed:.1%} by packing.')
    print(f'Loss per token {before:.3f} -> {after:.3f} in {steps} steps; {time.time() - start:.0f} s in all.')
    print(f'Adapter: {adapter}\nLog: {Path(options.output_dir) / "metrics.jsonl"}')
    problems = check(before, after, padded, packed)
    for problem in problems:
        print(f'PROBLEM: {problem}')
    return 1 if problems else 0


def check(before: float, after: float, padded: float, packed: float) -> list[str]:
    """What went wrong, if anything."""
    problems = []
    if not after < 0.9 * before:
        problems.append(f'the loss went from {before:.3f} to {after:.3f} only: nothing was learned')
    if packed > padded:
        problems.append(f'packing has more padding ({packed:.1%}) than padded batches ({padded:.1%})')
    return problems


if __name__ == '__main__':
    raise SystemExit(main())
