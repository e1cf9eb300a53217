"""Train over several processes with FSDP2, stop, and go on: save with the optimizer, resume, skip the rows that were seen.

    torchrun --nproc-per-node 2 cookbook/transformers/fsdp2.py                        # full parameters, sharded over 2
    torchrun --nproc-per-node 4 cookbook/transformers/fsdp2.py --fsdp-size 2          # 2 replicas of 2 shards (HSDP)
    torchrun --nproc-per-node 2 cookbook/transformers/fsdp2.py --lora                 # an adapter on a sharded base model
    torchrun --nproc-per-node 2 cookbook/transformers/fsdp2.py --resume output/fsdp2  # go on from the last checkpoint there
    python cookbook/transformers/fsdp2.py                                             # the same script, one process

With full parameters a checkpoint's folder is itself a model: `--model output/fsdp2/last`. With `--lora` it is a plain PEFT adapter.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from peft import LoraConfig
from tqdm import tqdm

from twinkle import DeviceMesh, get_logger, initialize
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.launcher import rank, world_size
from twinkle.model import TransformersModel

DATA = Path(__file__).parents[1] / 'data' / 'self_cognition.jsonl'
logger = get_logger('twinkle.cookbook')


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; `--help` lists them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--model', default='smollm2://135m-instruct', help='a folder, hf://org/name, ... (default: %(default)s)'
    )
    parser.add_argument('--data', default=str(DATA), help='rows of messages, jsonl')
    parser.add_argument('--output-dir', default='output/fsdp2', help='where checkpoints go (default: %(default)s)')
    parser.add_argument('--fsdp-size', type=int, help='ranks that shard the weights among them (default: all)')
    parser.add_argument('--ulysses-size', type=int, help='ranks that split sequences among them')
    parser.add_argument('--strategy', choices=['accelerate', 'native_fsdp'], default='native_fsdp')
    parser.add_argument('--lora', action='store_true', help='train an adapter instead of all parameters')
    parser.add_argument('--efficient-init', action='store_true', help='only rank 0 loads the weights')
    parser.add_argument('--resume', help='a checkpoint, or a folder of them: the latest')
    parser.add_argument('--epochs', type=int, default=1)
    parser.add_argument('--stop-after', type=int, help='optimizer steps of this run, at most; then save and end')
    parser.add_argument('--batch-size', type=int, default=8, help='rows per micro-batch, over all ranks')
    parser.add_argument('--accumulation', type=int, default=2, help='micro-batches per optimizer step')
    parser.add_argument('--save-steps', type=int, default=10, help='save every so many steps; the last two are kept')
    parser.add_argument('--lr', type=float, help='default: 1e-3 with --lora, else 2e-5')
    parser.add_argument('--seed', type=int, default=0)
    return parser.parse_args(arguments)


def make_mesh(options: argparse.Namespace) -> DeviceMesh:
    """Shards as asked for, and replicas of them on the ranks that are left."""
    world = world_size()
    return DeviceMesh.from_sizes(
        world_size=world, fsdp_size=options.fsdp_size or world, ulysses_size=options.ulysses_size
    )


def make_model(options: argparse.Namespace, total_steps: int) -> TransformersModel:
    """A model with its optimizer and schedule."""
    efficient = options.efficient_init and world_size() > 1
    model = TransformersModel(
        options.model, strategy=options.strategy, mixed_precision='no', memory_efficient_init=efficient
    )
    if options.lora:
        model.add_adapter_to_model('sft', LoraConfig(r=8, target_modules='all-linear'))
    model.set_template('default', model_id=options.model)
    model.set_optimizer('default', lr=options.lr or (1e-3 if options.lora else 2e-5))
    model.set_lr_scheduler('default', num_warmup_steps=2, num_training_steps=total_steps)
    return model


def train(
    options: argparse.Namespace, model: TransformersModel, dataloader: DataLoader, run: object, step: int, total: int
) -> list[float]:
    """Go on from a step to the end, or to where the run is to stop. Returns the losses of its steps."""
    losses: list[float] = []

    def save(name: str | None) -> None:
        state = dataloader.get_state()
        consumed = state['consumed_train_samples']
        model.save(name, options.output_dir, save_optimizer=True, consumed_train_samples=consumed, keep_last=2)

    with tqdm(total=total, initial=step, desc='Training', unit='step', disable=rank() != 0) as bar:
        while step < total:
            for batch in dataloader:
                model.forward_backward(inputs=batch, gradient_accumulation_steps=options.accumulation)
                if model.clip_grad_and_step() is None:
                    continue
                step += 1
                numbers = model.calculate_metric()  # on every rank: it is a mean over all of them
                losses.append(numbers['loss'])
                run.log(numbers, step=step)  # type: ignore[attr-defined]
                bar.update()
                bar.set_postfix(loss=f'{numbers["loss"]:.3f}')
                if len(losses) == options.stop_after or step == total:
                    save('last')
                    return losses
                if step % options.save_steps == 0:
                    save(None)
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, or go on training."""
    options = parse(arguments)
    mesh = make_mesh(options)
    with initialize(
        global_device_mesh=mesh, seed=options.seed, output_dir=options.output_dir, config=vars(options)
    ) as run:
        dataset = Dataset(DatasetMeta(options.data))
        dataset.map('self_cognition', name='Twinkle', author='the Twinkle team')
        dataset.set_template('default', model_id=options.model, max_length=512)
        dataset.encode()
        dataloader = DataLoader(dataset, batch_size=options.batch_size, shuffle=True, seed=options.seed, drop_last=True)
        total = options.epochs * math.floor(len(dataloader) / options.accumulation)
        model = make_model(options, total)
        step = 0
        if options.resume:
            state = model.resume_from_checkpoint(options.resume)
            dataloader.resume_from_checkpoint(state['consumed_train_samples'])
            step = state['cur_step']
            logger.info('Going on from step %d, %d rows in.', step, state['consumed_train_samples'])
        if rank() == 0:
            print(model.get_train_configs())
        return train(options, model, dataloader, run, step, total)


if __name__ == '__main__':
    main()
