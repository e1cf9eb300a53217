"""Small trainings that are run by one process and by two in several layouts; what they leave must agree.

torchrun --nproc-per-node 2 tests/distributed/scenarios.py FOLDER
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig

from tests.helpers import reference
from twinkle import DeviceMesh
from twinkle.launcher import rank
from twinkle.model import TransformersModel
from twinkle.runtime import initialize

Result = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """How a scenario is run: the mesh, and what else the model is told. `folder` is for files, the same on every rank."""

    name: str
    sizes: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def mesh(self) -> DeviceMesh:
        return DeviceMesh.from_sizes(**self.sizes, device_type='cpu')

    def model(self, source: str, **also: Any) -> TransformersModel:
        options = {'mixed_precision': 'no', 'device_mesh': self.mesh, **self.options, **also}
        return TransformersModel(source, **options)

    def mine(self, rows: list[Any], together: int = 1) -> list[Any]:
        """This rank's rows; `together` of them stay together."""
        part = self.mesh.get_slice(len(rows) // together)
        return rows[part.start * together : part.stop * together]


ONE = Setting('one', {'world_size': 1})
LAYOUTS = [
    Setting('dp2-native', {'dp_size': 2}, {'strategy': 'native_fsdp'}),
    Setting('dp2-accelerate', {'dp_size': 2}, {'strategy': 'accelerate'}),
    Setting('fsdp2-native', {'fsdp_size': 2}, {'strategy': 'native_fsdp'}),
    Setting('fsdp2-accelerate', {'fsdp_size': 2}, {'strategy': 'accelerate'}),
    Setting('ulysses2', {'dp_size': 2, 'ulysses_size': 2}, {'strategy': 'native_fsdp'}),
    Setting('ulysses2-fsdp2', {'fsdp_size': 2, 'ulysses_size': 2}, {'strategy': 'native_fsdp'}),
    Setting('tp2', {'tp_size': 2}, {'strategy': 'native_fsdp'}),
]


EXPERTS = Setting('ep2', {'fsdp_size': 2, 'ep_size': 2}, {'strategy': 'native_fsdp'})


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules='all-linear', init_lora_weights=False)


def add(model: TransformersModel, name: str, seed: int) -> None:
    torch.manual_seed(seed)
    model.add_adapter_to_model(name, lora())


def flat(weights: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {key: value.flatten()[:64].tolist() for key, value in sorted(weights.items())}


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Chosen and rejected in turn, with one prompt."""
    return reference.random_rows(2 * count, seed=seed)


def dpo(setting: Setting, sources: dict[str, str], folder: Path) -> Result:
    """Preference pairs with the disabled adapter as reference, accumulated twice; metrics over all ranks."""
    model = setting.model(sources['llama'])
    add(model, 'one', 3)
    model.set_loss('dpo', beta=0.5)
    model.add_metric('dpo')
    model.set_optimizer('SGD', lr=0.1)
    found: Result = {'losses': [], 'norms': [], 'margins': []}
    for step in range(3):
        for part in range(2):
            rows = setting.mine(pairs(4, seed=10 * step + part), together=2)
            model.forward_backward(inputs=rows, gradient_accumulation_steps=2)
        numbers = model.calculate_metric()
        found['losses'].append(numbers['loss'])
        found['margins'].append(numbers['reward_margin'])
        found['norms'].append(model.clip_grad_and_step())
    return {**found, 'weights': flat(model.get_state_dict())}


def grpo(setting: Setting, sources: dict[str, str], folder: Path) -> Result:
    """A policy loss over tokens with advantages per row and log-probabilities of before, full parameters."""
    model = setting.model(sources['llama'])
    model.set_loss('grpo', beta=0.0)
    model.set_optimizer('SGD', lr=0.1)
    found: Result = {'losses': [], 'norms': []}
    for step in range(3):
        rows = [
            {**row, 'advantages': (-1.0) ** i * (i + 1)} for i, row in enumerate(reference.random_rows(5, seed=step))
        ]
        mine = setting.mine(rows)
        old = model.forward_only(inputs=mine, return_outputs=['logps'])['logps'] + 0.1
        model.forward_backward(inputs=mine, old_logps=old)
        found['losses'].append(model.calculate_metric()['loss'])
        found['norms'].append(model.clip_grad_and_step())
    return {**found, 'weights': flat(model.get_state_dict())}


def infonce(setting: Setting, sources: dict[str, str], folder: Path) -> Result:
    """Negatives of all ranks, unequal numbers of queries on each."""
    # The head is not used, which PyTorch's DistributedDataParallel must be told.
    also = {'ddp_config': {'find_unused_parameters': True}} if setting.name == 'dp2-accelerate' else {}
    model = setting.model(sources['llama'], pooling='mean', **also)
    model.set_loss('infonce', temperature=0.2, device_mesh=setting.mesh)
    model.set_optimizer('SGD', lr=0.1)
    found: Result = {'losses': [], 'norms': []}
    for step in range(3):
        rows = [{'input_ids': row['input_ids']} for row in reference.random_rows(6, seed=step)]
        model.forward_backward(inputs=setting.mine(rows, together=2))
        found['losses'].append(model.calculate_metric()['loss'])
        found['norms'].append(model.clip_grad_and_step())
    return {**found, 'weights': flat(model.get_state_dict())}


def several_adapters(setting: Setting, sources: dict[str, str], folder: Path) -> Result:
    """Two adapters, the second added after the first has trained; they take turns, with windows of their own."""
    model = setting.model(sources['llama'])
    found: Result = {'losses': []}

    def train(name: str, seed: int, steps: int = 1) -> None:
        rows = setting.mine(reference.random_rows(5, seed=seed))
        model.forward_backward(inputs=rows, adapter_name=name, gradient_accumulation_steps=steps)
        found['losses'].append(model.calculate_metric(adapter_name=name)['loss'])

    add(model, 'one', 3)
    model.set_optimizer('AdamW', lr=1e-2, adapter_name='one')
    train('one', 0)
    model.clip_grad_and_step(adapter_name='one')
    add(model, 'two', 4)
    model.set_optimizer('SGD', lr=0.1, adapter_name='two')
    for seed in (1, 2, 3, 4):
        train('one', seed)
        train('two', 10 + seed, steps=2)
        model.clip_grad_and_step(adapter_name='one')
        model.clip_grad_and_step(adapter_name='two')
    weights = {
        f'{name}.{key}': value
        for name in ('one', 'two')
        for key, value in model.get_state_dict(adapter_name=name).items()
    }
    return {**found, 'weights': flat(weights)}


def flushed(setting: Setting, sources: dict[str, str], folder: Path) -> Result:
    """A window of four closed after two micro-batches, then a whole one, full parameters."""
    model = setting.model(sources['llama'])
    model.set_optimizer('SGD', lr=0.1)
    norms: list[Any] = []
    for seed in range(2):
        model.forward_backward(inputs=setting.mine(reference.random_rows(5, seed=seed)), gradient_accumulation_steps=4)
        assert model.clip_grad_and_step() is None
    norms.append(model.clip_grad_and_step(flush=True))
    for seed in range(4):
        model.forward_backward(inputs=setting.mine(reference.random_rows(5, seed=seed)))
        norms.append(model.clip_grad_and_step() or 0.0)
    return {'norms': norms, 'weights': flat(model.get_state_dict())}


def _steps(setting: Setting, model: TransformersModel, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        model.forward_backward(inputs=setting.mine(reference.random_rows(5, seed=seed)))
        losses.append(model.calculate_metric()['loss'])
        model.clip_grad_and_step()
    return losses


def _build(setting: Setting, source: str, kind: str, **also: Any) -> TransformersModel:
    model = setting.model(source, **also)
    if kind == 'lora':
        add(model, 'one', 3)
    model.set_optimizer('default', lr=1e-2)
    model.set_lr_scheduler('default', num_warmup_steps=1, num_training_steps=10)
    return model


def _checkpoint(setting: Setting, sources: dict[str, str], folder: Path, kind: str) -> Result:
    model = _build(setting, sources['llama'], kind)
    first = _steps(setting, model, range(3))
    saved = model.save('half', folder / setting.name, save_optimizer=True, consumed_train_samples=15)
    weights = flat(model.get_state_dict())
    rest = _steps(setting, model, range(3, 6))
    again = _build(setting, sources['llama'], kind)
    state = again.resume_from_checkpoint(saved)
    assert state == {'cur_step': 3, 'consumed_train_samples': 15, 'gradient_accumulation_steps': 1}
    resumed = _steps(setting, again, range(3, 6))
    assert resumed == rest, f'not exact: {resumed} {rest}'
    other = folder.parent / 'one' / kind  # of one process, which ran before
    crossed = []
    if (other / 'one' / 'half').exists():
        again = _build(setting, sources['llama'], kind)
        again.resume_from_checkpoint(other / 'one' / 'half')
        crossed = _steps(setting, again, range(3, 6))
        assert max(abs(a - b) for a, b in zip(crossed, rest, strict=True)) < 1e-5, f'{crossed} {rest}'
    return {'losses': first + rest, 'weights': weights}


def checkpoint_full(setting: Setting, sources: dict[str, str], folder: Path) -> Result:
    """Resume is exact; a checkpoint of one process goes on in this layout; full parameters."""
    return _checkpoint(setting, sources, folder / 'full', 'full')


def checkpoint_lora(setting: Setting, sources: dict[str, str], folder: Path) -> Result:
    """The same with an adapter."""
    return _checkpoint(setting, sources, folder / 'lora', 'lora')


def merged(setting: Setting, sources: dict[str, str], folder: Path) -> Result:
    """`merge_lora` writes a whole model; so does a background save."""
    model = setting.model(sources['llama'])
    add(model, 'one', 3)
    model.save('merged', folder / setting.name, merge_lora=True)
    model.save('adapter', folder / setting.name, async_save=True)
    plain = setting.model(str(folder / setting.name / 'merged'))
    rows = setting.mine(reference.random_rows(4))
    a = model.forward_only(inputs=rows)['logits']
    b = plain.forward_only(inputs=rows)['logits']
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    from twinkle.checkpoint import wait_for_saves

    wait_for_saves()
    return {'weights': flat(plain.get_state_dict())}


def overflow(setting: Setting, sources: dict[str, str], folder: Path) -> Result:
    """fp16 with a loss scale that overflows at first: every rank skips the same steps, and trains the same after them."""
    model = setting.model(sources['llama'], mixed_precision='fp16', grad_scaler_config={'init_scale': 2.0**40})
    model.set_optimizer('SGD', lr=0.1)
    losses = _steps(setting, model, range(30))
    state = model._adapters.get()
    assert state.skipped_steps > 5
    assert state.step > 5
    return {'skipped': [state.skipped_steps, state.step], 'close': losses}


def autocast(setting: Setting, sources: dict[str, str], folder: Path) -> Result:
    """bf16 by autocast: every parameter has its gradient from the first step on."""
    model = setting.model(sources['llama'], mixed_precision='bf16')
    model.set_optimizer('SGD', lr=0.1)
    found: Result = {'close': []}
    for seed in range(3):
        model.forward_backward(inputs=setting.mine(reference.random_rows(5, seed=seed)))
        found['close'] += [model.calculate_metric()['loss'], model.clip_grad_norm()]
        assert all(parameter.grad is not None for parameter in model.trainable_parameters(''))
        model.clip_grad_and_step()
    return found


def router_losses(setting: Setting, sources: dict[str, str], folder: Path) -> Result:
    """A mixture of experts whose router loss is of whole sequences."""
    model = setting.model(sources['routed'])
    model.set_optimizer('SGD', lr=0.1)
    norms = []
    for seed in range(3):
        rows = setting.mine(reference.random_rows(4, seed=seed))
        model.forward_backward(inputs=rows, gradient_accumulation_steps=1)
        norms.append(model.clip_grad_and_step())
    return {'norms': norms, 'weights': flat(model.get_state_dict())}


def router_losses_by_rank(setting: Setting, sources: dict[str, str], folder: Path) -> Result:
    """Router losses are means over micro-batches, and over ranks likewise: two ranks are two micro-batches of one process."""
    model = setting.model(sources['routed'])
    model.set_optimizer('SGD', lr=0.1)
    norms = []
    for seed in range(3):
        rows = reference.random_rows(4, seed=seed)
        alone = setting.mesh.data_world_size == 1
        for mine in (rows[:2], rows[2:]) if alone else (setting.mine(rows),):
            model.forward_backward(inputs=mine, gradient_accumulation_steps=2 if alone else 1)
        norms.append(model.clip_grad_and_step())
    return {'norms': norms, 'weights': flat(model.get_state_dict())}


def efficient_init(setting: Setting, sources: dict[str, str], folder: Path) -> Result:
    """Only rank 0 loads, and the others are given their shards: the same model, tied or not."""
    found: Result = {'losses': []}
    for source in ('llama', 'tied'):
        options = {'memory_efficient_init': True} if setting.mesh.world_size > 1 else {}
        model = _build(setting, sources[source], 'full', **options)
        found['losses'] += _steps(setting, model, range(3))
    return {**found, 'weights': flat(model.get_state_dict())}


Scenario = Callable[[Setting, dict[str, str], Path], Result]
SCENARIOS: dict[str, tuple[Scenario, tuple[str, ...]]] = {
    'dpo': (dpo, ()),
    'grpo': (grpo, ()),
    'infonce': (infonce, ()),
    'several_adapters': (several_adapters, ()),
    'flushed': (flushed, ()),
    'checkpoint_full': (checkpoint_full, ()),
    'checkpoint_lora': (checkpoint_lora, ()),
    'merged': (merged, ()),
    'overflow': (overflow, ('dp2-native', 'dp2-accelerate', 'fsdp2-native', 'fsdp2-accelerate')),
    'autocast': (autocast, ()),
    'router_losses': (router_losses, ('ulysses2', 'ulysses2-fsdp2')),
    'router_losses_by_rank': (
        router_losses_by_rank,
        ('dp2-native', 'dp2-accelerate', 'fsdp2-native', 'fsdp2-accelerate', 'ep2'),
    ),
    'efficient_init': (efficient_init, ('fsdp2-native', 'fsdp2-accelerate', 'ulysses2-fsdp2')),
}
"""By name, with the layouts that they are for; none means all."""


def runs() -> list[tuple[str, Setting]]:
    return [
        (name, setting)
        for name, (_, only) in SCENARIOS.items()
        for setting in LAYOUTS
        if not only or setting.name in only
    ]


def main(arguments: list[str]) -> None:
    here, chosen = Path(arguments[0]), arguments[1:]
    torch.set_num_threads(1)
    with initialize(timeout=60):
        sources = json.loads((here / 'dirs.json').read_text())
        seen: dict[str, Any] = {}
        for name, setting in runs():
            key = f'{name}:{setting.name}'
            if chosen and not any(part in key for part in chosen):
                continue
            try:
                seen[key] = SCENARIOS[name][0](setting, sources, here / name)
            except Exception:
                seen[key] = {'error': traceback.format_exc()}
                print(f'rank {rank()}: {key}\n{traceback.format_exc()}', file=sys.stderr, flush=True)
            (here / f'rank{rank()}.json').write_text(json.dumps(seen))
            dist.barrier()


if __name__ == '__main__':
    main(sys.argv[1:])
