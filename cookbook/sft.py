"""Teach a small model its name: LoRA on SmolLM2-135M-Instruct, on a laptop's CPU, in a few minutes.

    python cookbook/sft.py                     # what `nox -s demo` runs
    python cookbook/sft.py --name Star --author 'the night shift' --epochs 3

It asks questions that are not in the training data before and after, draws the loss, saves the adapter, and loads it again with
plain PEFT to see that it says the same there. Exits 1 if the taught name is not learned.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tqdm import tqdm

from twinkle import DeviceMesh, initialize
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.template import Template

HERE = Path(__file__).parent
HELD_OUT = [
    'Hello, could you please tell me who you are?',
    'What name do people use for you?',
    'Who was it that made you?',
    'Say hello and introduce yourself to my class.',
    'Which people trained this model?',
    'Please tell me your name and where you are from.',
]
KEPT = ['What is the capital of Italy?', 'How many legs does a dog have?']


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; `--help` lists them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--model', default='smollm2://135m-instruct', help='a folder, hf://org/name, ... (default: %(default)s)'
    )
    parser.add_argument('--data', default=str(HERE / 'data' / 'self_cognition.jsonl'), help='rows of messages, jsonl')
    parser.add_argument('--output-dir', default='output/sft', help='where the adapter, the log and the drawing go')
    parser.add_argument('--name', default='Twinkle', help='the name to teach (default: %(default)s)')
    parser.add_argument('--author', default='the Twinkle team', help='the makers to teach (default: %(default)s)')
    parser.add_argument('--epochs', type=positive, default=4)
    parser.add_argument('--steps', type=positive, help='optimizer steps, at most (default: all of the epochs)')
    parser.add_argument('--batch-size', type=positive, default=8)
    parser.add_argument('--accumulation', type=positive, default=1, help='micro-batches per optimizer step')
    parser.add_argument('--lr', type=float, default=1e-3)
    parser.add_argument('--rank', type=positive, default=8, help='of LoRA')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--max-new-tokens', type=positive, default=40, help='of the answers')
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text} is less than 1')
    return number


def load_data(options: argparse.Namespace) -> Dataset:
    """Rows with the name filled in, encoded for the model."""
    dataset = Dataset(DatasetMeta(options.data))
    dataset.map('self_cognition', name=options.name, author=options.author)
    dataset.set_template('default', model_id=options.model, max_length=512)
    dataset.encode()
    return dataset


def answer(module: Any, template: Template, question: str, max_new_tokens: int) -> str:
    """What the module says, word by most likely word."""
    prompt = template.encode_prompt([{'role': 'user', 'content': question}])
    ids = torch.tensor([prompt], device=module.device)
    limits = {'max_new_tokens': max_new_tokens, 'do_sample': False, 'pad_token_id': template.pad_token_id}
    module.eval()
    with torch.no_grad():
        out = module.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **limits)
    return template.decode(out[0, len(prompt) :].tolist(), skip_special_tokens=True).strip()


def train(model: TransformersModel, dataloader: DataLoader, epochs: int, steps: int, run: Any) -> list[float]:
    """The loop. Returns the loss of every optimizer step."""
    losses: list[float] = []
    with tqdm(total=steps, desc='Training', unit='step') as bar:
        for _ in range(epochs):
            for batch in dataloader:
                model.forward_backward(inputs=batch)
                if model.clip_grad_and_step() is not None:
                    losses.append(report(model, bar, run))
                if len(losses) == steps:
                    return losses
            if model.clip_grad_and_step(flush=True) is not None:  # a last, partial window of the epoch
                losses.append(report(model, bar, run))
    return losses


def report(model: TransformersModel, bar: tqdm, run: Any) -> float:
    """Show and log the numbers of a step."""
    numbers = model.calculate_metric()
    run.log(numbers, step=int(numbers['step']))
    shown = {
        'loss': f'{numbers["loss"]:.3f}',
        'lr': f'{numbers["lr"]:.1e}',
        'tokens/s': f'{numbers["tokens_per_second"]:.0f}',
    }
    bar.update()
    bar.set_postfix(shown)
    return numbers['loss']


def draw(losses: list[float], title: str, path: Path) -> None:
    """The loss curve as a PNG."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1.5)
    axes.set(xlabel='optimizer step', ylabel='loss per token', title=title)
    axes.grid(alpha=0.3)
    axes.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def show(questions: list[str], before: list[str], after: list[str]) -> None:
    """Answers side by side."""
    import textwrap

    width = 46
    print(f'\n{"before":<{width}}  after')
    for question, old, new in zip(questions, before, after, strict=True):
        print(f'\n> {question}')
        left, right = textwrap.wrap(old, width) or [''], textwrap.wrap(new, width) or ['']
        for i in range(max(len(left), len(right))):
            print(f'{left[i] if i < len(left) else "":<{width}}  {right[i] if i < len(right) else ""}')


def check(before: list[str], after: list[str], reloaded: str, options: argparse.Namespace) -> list[str]:
    """What went wrong, if anything."""
    named_before = sum(
        options.name.lower() in text.lower() or options.author.lower() in text.lower() for text in before
    )
    named_after = sum(options.name.lower() in text.lower() or options.author.lower() in text.lower() for text in after)
    print(
        f'\n{options.name!r} or {options.author!r} in the answers: {named_before} of {len(before)} before, {named_after} after'
    )
    problems = []
    if named_before:
        problems.append(f'{options.name!r} was in the answers before training already')
    if named_after < len(after) - 1 or not any(options.name.lower() in text.lower() for text in after):
        problems.append(
            f'only {named_after} of {len(after)} answers name {options.name!r} or {options.author!r} after training'
        )
    if reloaded != after[0]:
        problems.append(f'plain PEFT answers {reloaded!r} with the saved adapter, and the trained model {after[0]!r}')
    return problems


def main(arguments: list[str] | None = None) -> int:
    """Train, ask, draw, save, reload."""
    options = parse(arguments)
    output_dir = Path(options.output_dir)
    start = time.time()
    mesh = DeviceMesh.from_sizes(world_size=1)
    with initialize(seed=options.seed, output_dir=output_dir, global_device_mesh=mesh, config=vars(options)) as run:
        dataset = load_data(options)
        dataloader = DataLoader(dataset, batch_size=options.batch_size, shuffle=True, seed=options.seed)
        model = TransformersModel(model_id=options.model, mixed_precision='no' if mesh.device_type == 'cpu' else 'bf16')
        template = dataset.template
        print(f'Asking {len(HELD_OUT) + len(KEPT)} questions before training ...', flush=True)
        ask = [*HELD_OUT, *KEPT]
        before = [answer(model.model, template, question, options.max_new_tokens) for question in ask]

        lora = LoraConfig(
            r=options.rank, lora_alpha=2 * options.rank, target_modules='all-linear', task_type='CAUSAL_LM'
        )
        model.add_adapter_to_model('sft', lora, gradient_accumulation_steps=options.accumulation)
        steps = math.ceil(len(dataloader) / options.accumulation) * options.epochs
        steps = steps if options.steps is None else min(steps, options.steps)
        model.set_template(template)
        model.set_optimizer('default', lr=options.lr)
        model.set_lr_scheduler('default', num_warmup_steps=max(1, steps // 10), num_training_steps=steps)
        print(f'\n{model.get_train_configs()}\n')
        losses = train(model, dataloader, options.epochs, steps, run)
        print('Asking again ...', flush=True)
        after = [answer(model.model, template, question, options.max_new_tokens) for question in ask]
        adapter = model.save('last', output_dir=output_dir)

    draw(losses, f'LoRA on {options.model}: learning its name', output_dir / 'loss.png')
    show(ask, before, after)
    again = reload_with_peft(options.model, adapter).to(model.device)
    reloaded = answer(again, template, HELD_OUT[0], options.max_new_tokens)
    problems = check(before[: len(HELD_OUT)], after[: len(HELD_OUT)], reloaded, options)
    print(f'Loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps; {time.time() - start:.0f} s in all.')
    print(f'Adapter: {adapter}\nLoss curve: {output_dir / "loss.png"}\nLog: {output_dir / "metrics.jsonl"}')
    for problem in problems:
        print(f'PROBLEM: {problem}')
    return 1 if problems else 0


def reload_with_peft(model_id: str, adapter: str) -> Any:
    """The saved adapter on a fresh base model, without Twinkle's model class."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from twinkle.hub import resolve_model

    base = AutoModelForCausalLM.from_pretrained(resolve_model(model_id), dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter)


if __name__ == '__main__':
    raise SystemExit(main())
