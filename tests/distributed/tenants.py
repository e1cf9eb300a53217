"""Tenants over two or four ranks: early and late, in turn and in one pass. Run by torchrun; also by one process to compare."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig

from tests.distributed.scenarios import Result, Setting, flat
from tests.helpers import reference
from twinkle.launcher import rank, world_size
from twinkle.model import MultiLoraTransformersModel
from twinkle.runtime import initialize

RANKS = {'one': 4, 'two': 2, 'three': 8}


def settings() -> list[Setting]:
    """The layouts of as many ranks as there are."""
    world = world_size()
    found = [
        Setting('dp-native', {'dp_size': world}, {'strategy': 'native_fsdp'}),
        Setting('dp-accelerate', {'dp_size': world}, {'strategy': 'accelerate'}),
        Setting('fsdp-native', {'fsdp_size': world}, {'strategy': 'native_fsdp'}),
        Setting('fsdp-accelerate', {'fsdp_size': world}, {'strategy': 'accelerate'}),
    ]
    if world == 4:
        found.append(Setting('hsdp', {'fsdp_size': 2, 'dp_size': 2}, {'strategy': 'native_fsdp'}))
    if world == 2:
        found.append(Setting('ulysses', {'fsdp_size': 2, 'ulysses_size': 2}, {'strategy': 'native_fsdp'}))
    return found


def run(setting: Setting, source: str, folder: Path) -> Result:
    """Three tenants, the last one after the others have trained; then all in one pass, of which a rank may lack one."""
    options = {'mixed_precision': 'no', 'device_mesh': setting.mesh, 'max_loras': 3, 'max_r': 8, **setting.options}
    model = MultiLoraTransformersModel(model_id=source, **options)
    found: Result = {'losses': [], 'norms': []}

    def enter(name: str, seed: int) -> None:
        torch.manual_seed(seed + rank())  # what rank 0 drew counts
        config = LoraConfig(r=RANKS[name], target_modules='all-linear', init_lora_weights='gaussian')
        model.multi_lora.acquire_lora(name, config)
        model.set_optimizer('AdamW', lr=1e-3, adapter_name=name)

    def step(name: str, seed: int) -> None:
        rows = setting.mine(reference.random_rows(5, seed=seed))
        model.forward_backward(inputs=rows, adapter_name=name)
        found['losses'].append(model.calculate_metric(adapter_name=name)['loss'])
        found['norms'].append(model.clip_grad_and_step(adapter_name=name))

    enter('one', 10)
    enter('two', 20)
    for seed in range(2):
        step('one', seed)
        step('two', 10 + seed)
    enter('three', 30)
    for seed in range(3):
        step('three', 20 + seed)
    for turn in range(3):
        rows = reference.random_rows(6, seed=40 + turn)
        names = ['one', 'one', 'two', 'two', 'three', 'three']
        part = setting.mesh.get_slice(6)
        model.forward_backward(inputs=rows[part], adapter_name=names[part])
        found['losses'] += [model.calculate_metric(adapter_name=name)['loss'] for name in RANKS]
        norms = model.clip_grad_and_step(adapter_name=list(RANKS))
        found['norms'] += [norms[name] for name in RANKS]
    model.save('two', folder / setting.name, adapter_name='two', save_optimizer=True)
    weights = {
        f'{name}.{key}': value for name in RANKS for key, value in model.get_state_dict(adapter_name=name).items()
    }
    model.multi_lora.release_lora('two')
    enter('two', 99)
    model.resume_from_checkpoint(folder / setting.name / 'two', adapter_name='two')
    step('two', 60)
    return {**found, 'weights': flat(weights)}


def main(arguments: list[str]) -> None:
    here = Path(arguments[0])
    torch.set_num_threads(1)
    with initialize(timeout=60):
        seen: dict[str, Any] = {}
        for setting in settings():
            try:
                seen[setting.name] = run(setting, arguments[1], here / f'files{world_size()}')
            except Exception:
                seen[setting.name] = {'error': traceback.format_exc()}
                print(f'rank {rank()}: {setting.name}\n{traceback.format_exc()}', file=sys.stderr, flush=True)
            (here / f'rank{rank()}.json').write_text(json.dumps(seen))
            dist.barrier()


if __name__ == '__main__':
    main(sys.argv[1:])
