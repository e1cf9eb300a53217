"""The table of layouts that are compared with one process, and what each rank does for a case. Run by torchrun, many cases a launch:

torchrun --nproc-per-node 2 tests/distributed/cases.py FOLDER [NAME ...]
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.helpers import reference
from twinkle import DeviceMesh
from twinkle.model import TransformersModel
from twinkle.processor.joining import join_features
from twinkle.runtime import initialize

LR = 1e-2
STEPS = 5


@dataclass(frozen=True)
class Case:
    """One layout with one way of training.

    Attributes:
        sizes: of the mesh.
        kind: `full` or `lora`.
        packed: rows of a rank are one packed row.
        accumulation: micro-batches per step.
        family: which tiny model.
    """

    name: str
    sizes: dict[str, int]
    strategy: str = 'native_fsdp'
    kind: str = 'full'
    packed: bool = False
    accumulation: int = 1
    family: str = 'llama'
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        size = 1
        for name in ('dp_size', 'fsdp_size', 'tp_size'):
            size *= self.sizes.get(name, 1)
        return size


def _cases(modes: list[tuple[str, bool, int]]) -> list[Case]:
    """Every layout in these modes."""
    layouts: list[tuple[str, dict[str, int], str, str, dict[str, Any]]] = [
        ('ddp2-native', {'dp_size': 2}, 'native_fsdp', 'llama', {}),
        ('ddp2-accelerate', {'dp_size': 2}, 'accelerate', 'llama', {}),
        ('fsdp2-native', {'fsdp_size': 2}, 'native_fsdp', 'llama', {}),
        ('fsdp2-accelerate', {'fsdp_size': 2}, 'accelerate', 'llama', {}),
        ('fsdp2-tied', {'fsdp_size': 2}, 'native_fsdp', 'tied', {}),
        ('fsdp2-options', {'fsdp_size': 2}, 'native_fsdp', 'llama',
         {'fsdp_config': {'reshard_after_forward': False, 'sync_each_micro_batch': True}}),
        ('fsdp4-native', {'fsdp_size': 4}, 'native_fsdp', 'llama', {}),
        ('fsdp4-accelerate', {'fsdp_size': 4}, 'accelerate', 'llama', {}),
        ('hsdp2x2-native', {'dp_size': 2, 'fsdp_size': 2}, 'native_fsdp', 'llama', {}),
        ('hsdp2x2-accelerate', {'dp_size': 2, 'fsdp_size': 2}, 'accelerate', 'llama', {}),
        ('ulysses2', {'dp_size': 2, 'ulysses_size': 2}, 'native_fsdp', 'llama', {}),
        ('ulysses2-eager', {'dp_size': 2, 'ulysses_size': 2}, 'accelerate', 'qwen3', {'attn_implementation': 'eager'}),
        ('ulysses2-sliding', {'dp_size': 2, 'ulysses_size': 2}, 'native_fsdp', 'sliding', {}),
        ('ulysses2-fsdp2', {'fsdp_size': 2, 'ulysses_size': 2}, 'native_fsdp', 'llama', {}),
        ('ulysses4-fsdp4', {'fsdp_size': 4, 'ulysses_size': 4}, 'native_fsdp', 'llama', {}),
        ('ulysses2-fsdp2-dp2', {'fsdp_size': 2, 'dp_size': 2, 'ulysses_size': 2}, 'accelerate', 'deepseek_v3', {}),
        ('tp2', {'tp_size': 2}, 'native_fsdp', 'llama', {}),
        ('tp2-qwen3', {'tp_size': 2}, 'native_fsdp', 'qwen3', {}),
        ('tp2-fsdp2', {'tp_size': 2, 'fsdp_size': 2}, 'native_fsdp', 'llama', {}),
        ('tp2-dp2', {'tp_size': 2, 'dp_size': 2}, 'native_fsdp', 'qwen3', {}),
        ('ep2-qwen3_moe', {'dp_size': 2, 'ep_size': 2}, 'native_fsdp', 'qwen3_moe', {}),
        ('ep2-deepseek_v3', {'fsdp_size': 2, 'ep_size': 2}, 'native_fsdp', 'deepseek_v3', {}),
        ('ep2-glm4_moe', {'fsdp_size': 2, 'ep_size': 2}, 'native_fsdp', 'glm4_moe', {}),
        ('ep2-qwen3_5_moe', {'fsdp_size': 2, 'ep_size': 2}, 'native_fsdp', 'qwen3_5_moe', {}),
        ('ep2-fsdp4', {'fsdp_size': 4, 'ep_size': 2}, 'native_fsdp', 'qwen3_moe', {}),
        ('ep2-fsdp2-dp2', {'fsdp_size': 2, 'dp_size': 2, 'ep_size': 2}, 'native_fsdp', 'deepseek_v3', {}),
    ]  # fmt: skip
    return [
        Case(f'{name}-{kind}-{"packed" if packed else "padded"}-{g}', sizes, strategy, kind, packed, g, family, options)
        for name, sizes, strategy, family, options in layouts
        for kind, packed, g in modes
    ]


MODES = [('full', False, 1), ('full', True, 3), ('lora', True, 1), ('lora', False, 3)]
"""Kind, packed, accumulation: every pair of values once."""
OTHER_MODES = [('full', False, 3), ('full', True, 1), ('lora', True, 3), ('lora', False, 1)]
"""The rest of the full product, for the session `tests_full`."""
CASES = _cases(MODES)
FULL_CASES = _cases(OTHER_MODES)


def model_dirs(folder: Path) -> dict[str, str]:
    """Tiny random models of every family, saved once."""
    from tests.helpers.models import tiny_dir, tiny_llama_dir

    others = ('qwen3', 'sliding', 'qwen3_moe', 'deepseek_v3', 'glm4_moe', 'qwen3_5_moe')
    return {
        **{family: tiny_dir(family, folder / family) for family in others},
        'llama': tiny_llama_dir(folder / 'llama'),
        'tied': tiny_llama_dir(folder / 'tied', tie=True),
    }


def lora_of(case: Case) -> LoraConfig:
    targets = (
        'all-linear'
        if case.family in ('llama', 'tied', 'qwen3')
        else ['q_proj', 'q_a_proj', 'v_proj', 'kv_b_proj', 'o_proj']
    )
    return LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights='gaussian')


def windows_of(case: Case) -> list[list[list[dict[str, Any]]]]:
    """Micro-batches of five rows: ranks have unequal numbers of them; in one, all rows of a rank have nothing to learn."""
    rows = reference.random_rows(5 * STEPS * case.accumulation, seed=7)
    for row in rows[:3]:
        row['labels'] = [-100] * len(row['labels'])
    micro = [rows[i : i + 5] for i in range(0, len(rows), 5)]
    return [micro[i : i + case.accumulation] for i in range(0, len(micro), case.accumulation)]


def run_case(case: Case, folder: str, here: Path) -> dict[str, Any]:
    """Train both ways and compare."""
    mesh = DeviceMesh.from_sizes(**case.sizes, device_type='cpu')
    windows = windows_of(case)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = TransformersModel(folder, mixed_precision='no', device_mesh=mesh, strategy=case.strategy, **case.options)
    name = ''
    if case.kind == 'lora':
        torch.manual_seed(3)
        plain = get_peft_model(plain, lora_of(case), adapter_name='mine')
        torch.manual_seed(3 + dist.get_rank())  # what rank 0 drew counts
        name = model.add_adapter_to_model('mine', lora_of(case))
    expected = reference.train(plain, windows, lr=LR)
    model.set_optimizer('default', lr=LR, weight_decay=0.01)
    model.set_lr_scheduler('default', num_warmup_steps=2, num_training_steps=len(windows))
    losses, norms, lrs = [], [], []
    for window in windows:
        for rows in window:
            mine = rows[mesh.get_slice(len(rows))]
            inputs = [join_features(mine)] if case.packed else mine
            model.forward_backward(inputs=inputs, gradient_accumulation_steps=case.accumulation)
            numbers = model.calculate_metric()
            losses.append(numbers['loss'])
            lrs.append(numbers['lr'])
            norm = model.clip_grad_and_step()
        norms.append(norm)
    weights = model.get_state_dict()
    if name:
        theirs = {
            key.replace('.mine.weight', '.weight'): value for key, value in plain.state_dict().items() if 'lora_' in key
        }
    else:
        theirs = plain.state_dict()
    assert weights.keys() == theirs.keys(), sorted(weights.keys() ^ theirs.keys())[:4]
    return {
        'losses': losses, 'norms': norms, 'lrs': lrs[:: case.accumulation],
        'expected_losses': expected.losses, 'expected_norms': expected.norms, 'expected_lrs': expected.lrs,
        'weights': max(float((weights[key] - theirs[key]).abs().max()) for key in theirs),
        'parameters': sorted({type(p).__name__ for p in model.model.parameters()}),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    here = Path(arguments[0])
    chosen = arguments[1:]
    torch.set_num_threads(1)
    with initialize(timeout=90):
        rank, world = dist.get_rank(), dist.get_world_size()
        dirs = json.loads((here / 'dirs.json').read_text())
        seen: dict[str, Any] = {}
        for case in FULL_CASES if chosen == ['full'] else CASES:
            if case.world != world or (chosen not in ([], ['full']) and not any(part in case.name for part in chosen)):
                continue
            try:
                seen[case.name] = run_case(case, dirs[case.family], here)
            except Exception:
                seen[case.name] = {'error': traceback.format_exc()}
                print(f'rank {rank}: {case.name}\n{traceback.format_exc()}', file=sys.stderr, flush=True)
            (here / f'rank{rank}.json').write_text(json.dumps(seen))
        dist.barrier()


if __name__ == '__main__':
    main(sys.argv[1:])
