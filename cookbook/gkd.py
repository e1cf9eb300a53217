"""Distillation: a student learns what its teacher would say next, all likely words of it. A few minutes on a laptop's CPU.

    python cookbook/gkd.py                                  # the student is the teacher without a fifth of its layers
    python cookbook/gkd.py --teacher BIG --student SMALL    # folders or ids of two models with one tokenizer

The teacher gives its top-k log-probabilities at every place of an answer, and the student, through LoRA, learns to give the same. It
measures the divergence of whole distributions, KL(teacher | student) per token, on held-out rows. Exits 1 if it did not fall.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from peft import LoraConfig
from torch import Tensor, nn
from tqdm import tqdm

from twinkle import DeviceMesh, initialize
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel

HERE = Path(__file__).parent


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; `--help` lists them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--teacher',
        '--model',
        default='smollm2://135m-instruct',
        help='a folder, hf://org/name, ... (default: %(default)s)',
    )
    parser.add_argument('--student', help='another model (default: the teacher with some of its layers left out)')
    parser.add_argument('--drop-layers', type=positive, help='how many, of the middle (default: a fifth of them)')
    parser.add_argument('--data', default=str(HERE / 'data' / 'self_cognition.jsonl'), help='rows of messages, jsonl')
    parser.add_argument('--output-dir', default='output/gkd', help='where the student, its adapter and the log go')
    parser.add_argument('--held-out', type=positive, default=16, help='rows to measure with (default: %(default)s)')
    parser.add_argument('--top-k', type=positive, default=64, help='words of the teacher (default: %(default)s)')
    parser.add_argument('--epochs', type=positive, default=3)
    parser.add_argument('--batch-size', type=positive, default=8)
    parser.add_argument('--lr', type=float, default=1e-3)
    parser.add_argument('--rank', type=positive, default=16, help='of LoRA')
    parser.add_argument('--seed', type=int, default=0)
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text} is less than 1')
    return number


def cut_student(teacher: str, drop: int | None, folder: Path) -> str:
    """Save the teacher without `drop` of its middle layers, where leaving some out hurts least."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from twinkle.hub import resolve_model

    source = resolve_model(teacher)
    module = AutoModelForCausalLM.from_pretrained(source)
    layers = module.model.layers
    drop = max(1, len(layers) // 5) if drop is None else drop
    if drop >= len(layers):
        raise SystemExit(f'--drop-layers {drop}: the teacher has {len(layers)}')
    first = (len(layers) - drop + 1) // 2
    module.model.layers = nn.ModuleList([*layers[:first], *layers[first + drop :]])
    module.config.num_hidden_layers = len(module.model.layers)
    if getattr(module.config, 'layer_types', None):
        module.config.layer_types = module.config.layer_types[:first] + module.config.layer_types[first + drop :]
    module.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    print(f'Student: the teacher without {drop} of its {len(layers)} layers')
    return str(folder)


def load_data(options: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """Rows to train on, and held-out ones."""
    rows = list(Dataset(DatasetMeta(options.data)))
    if len(rows) <= options.held_out:
        raise SystemExit(f'--held-out {options.held_out}: {options.data} has {len(rows)} rows')
    loaders = []
    for part, shuffle in ((rows[: -options.held_out], True), (rows[-options.held_out :], False)):
        dataset = Dataset(DatasetMeta(part))
        dataset.map('self_cognition', name='Twinkle', author='the Twinkle team')
        dataset.set_template('default', model_id=options.teacher, max_length=512)
        dataset.encode()
        loaders.append(DataLoader(dataset, batch_size=options.batch_size, shuffle=shuffle, seed=options.seed))
    return loaders[0], loaders[1]


def teach(teacher: TransformersModel, batch: Any) -> Tensor:
    """The teacher's logits [B, T, V]."""
    return teacher.forward_only(batch, return_outputs=('logits',))['logits']


def train(
    student: TransformersModel, teacher: TransformersModel, dataloader: DataLoader, options: Any, run: Any
) -> int:
    """The loop. Returns the number of steps."""
    steps = 0
    with tqdm(total=len(dataloader) * options.epochs, desc='Training', unit='step') as bar:
        for _ in range(options.epochs):
            for batch in dataloader:
                logps, ids = teach(teacher, batch).float().log_softmax(-1).topk(options.top_k)
                student.forward_backward(inputs=batch, teacher_topk_logps=logps, teacher_topk_ids=ids)
                student.clip_grad_and_step()
                numbers = student.calculate_metric()
                run.log(numbers, step=int(numbers['step']))
                steps += 1
                bar.update()
                bar.set_postfix(divergence=f'{numbers["loss"]:.3f}', lr=f'{numbers["lr"]:.1e}')
    return steps


def evaluate(student: TransformersModel, teacher: TransformersModel, dataloader: DataLoader) -> float:
    """KL(teacher | student) per token, over the whole vocabulary."""
    for batch in dataloader:
        student.forward_only(batch, return_logits=False, teacher_logits=teach(teacher, batch))
    return student.calculate_metric(is_training=False)['loss']


def main(arguments: list[str] | None = None) -> int:
    """Make the student, measure, train, measure again."""
    options = parse(arguments)
    output_dir = Path(options.output_dir)
    start = time.time()
    mesh = DeviceMesh.from_sizes(world_size=1)
    with initialize(seed=options.seed, output_dir=output_dir, global_device_mesh=mesh, config=vars(options)) as run:
        name = options.student or cut_student(options.teacher, options.drop_layers, output_dir / 'student')
        dataloader, held_out = load_data(options)
        precision = 'no' if mesh.device_type == 'cpu' else 'bf16'
        teacher = TransformersModel(model_id=options.teacher, mixed_precision=precision)
        student = TransformersModel(model_id=name, mixed_precision=precision)
        lora = LoraConfig(
            r=options.rank, lora_alpha=2 * options.rank, target_modules='all-linear', task_type='CAUSAL_LM'
        )
        student.add_adapter_to_model('gkd', lora)
        student.set_loss('gkd', beta=0.0)  # KL(teacher | student): all that a top-k teacher allows
        steps = len(dataloader) * options.epochs
        student.set_optimizer('default', lr=options.lr)
        student.set_lr_scheduler('default', num_warmup_steps=max(1, steps // 10), num_training_steps=steps)
        before = evaluate(student, teacher, held_out)
        steps = train(student, teacher, dataloader, options, run)
        after = evaluate(student, teacher, held_out)
        adapter = student.save('last', output_dir=output_dir)

    print(f'Divergence per token on {options.held_out} held-out rows: {before:.3f} -> {after:.3f} in {steps} steps.')
    print(
        f'{time.time() - start:.0f} s in all.\nStudent: {name}\nAdapter: {adapter}\nLog: {output_dir / "metrics.jsonl"}'
    )
    problems = check(before, after)
    for problem in problems:
        print(f'PROBLEM: {problem}')
    return 1 if problems else 0


def check(before: float, after: float) -> list[str]:
    """What went wrong, if anything."""
    if after < 0.9 * before:
        return []
    return [f'the divergence went from {before:.3f} to {after:.3f} only: nothing was learned']


if __name__ == '__main__':
    raise SystemExit(main())
