"""What one process does in small trainings, two do in every layout: losses, norms, metrics, checkpoints."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.scenarios import ONE, SCENARIOS, _build, _steps, runs
from tests.helpers.launch import torchrun
from tests.helpers.models import tiny_dir, tiny_llama_dir
from twinkle.errors import CheckpointError
from twinkle_hf.parallel.states import load_training_state


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp('scenarios')
    sources = {
        'llama': tiny_llama_dir(found / 'llama'),
        'tied': tiny_llama_dir(found / 'tied', tie=True),
        'routed': tiny_dir('qwen3_moe', found / 'routed', output_router_logits=True, router_aux_loss_coef=0.5),
    }
    (found / 'dirs.json').write_text(json.dumps(sources))
    return found


@pytest.fixture(scope='module')
def one(folder):
    """What one process leaves, by scenario."""
    sources = json.loads((folder / 'dirs.json').read_text())
    return {name: scenario(ONE, sources, folder / name / 'one') for name, (scenario, _) in SCENARIOS.items()}


@pytest.fixture(scope='module')
def two(folder, one):
    """What each of two leaves."""
    for name in ('checkpoint_full', 'checkpoint_lora'):
        kind = name.partition('_')[2]
        (folder / name / 'one' / kind / 'one' / 'half').stat()
    launched = torchrun(2, Path(__file__).with_name('scenarios.py'), str(folder), timeout=900)
    assert launched.returncode == 0, launched.stderr[-4000:]
    return [json.loads((folder / f'rank{rank}.json').read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(('name', 'layout'), [(name, setting.name) for name, setting in runs()])
def test_two_processes_leave_what_one_leaves(one, two, name, layout):
    """Losses and norms to 1e-5, weights after some steps to 1e-4, on both ranks."""
    for rank, seen in enumerate(two):
        found, expected = seen[f'{name}:{layout}'], one[name]
        assert 'error' not in found, f'rank {rank}: {found["error"]}'
        assert found.keys() == expected.keys()
        for key in found.keys() - {'weights', 'close'}:
            assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key
        # fp16 products of other shapes round otherwise
        assert found.get('close', []) == pytest.approx(expected.get('close', []), rel=1e-2)
        weights = found.get('weights', {})
        assert weights.keys() == expected.get('weights', {}).keys()
        for key, values in weights.items():
            assert values == pytest.approx(expected['weights'][key], rel=1e-4, abs=1e-4), key


@pytest.mark.parametrize('layout', [setting.name for _, setting in runs() if _ == 'checkpoint_full'])
def test_files_of_any_layout_are_those_of_one_process(two, folder, layout):
    """Weights that two ranks saved have the names, shapes and dtypes of one process's, and its values to 1e-4."""
    for kind, file in (('full', 'model.safetensors'), ('lora', 'adapter_model.safetensors')):
        base = folder / f'checkpoint_{kind}'
        mine = load_file(base / kind / layout / 'half' / file)
        theirs = load_file(base / 'one' / kind / 'one' / 'half' / file)
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert mine[key].dtype == value.dtype
            assert mine[key].shape == value.shape
            assert (mine[key] - value).abs().max() < 1e-4


@pytest.mark.parametrize('layout', ['fsdp2-native', 'fsdp2-accelerate', 'ulysses2-fsdp2', 'tp2', 'dp2-native'])
@pytest.mark.parametrize('kind', ['full', 'lora'])
def test_one_process_goes_on_from_the_checkpoint_of_two(two, one, folder, kind, layout):
    """Sharded optimizer state is whole again in one process, and its next losses are those of one that trained alone."""
    sources = json.loads((folder / 'dirs.json').read_text())
    model = _build(ONE, sources['llama'], kind)
    state = model.resume_from_checkpoint(folder / f'checkpoint_{kind}' / kind / layout / 'half')
    assert state['cur_step'] == 3
    losses = _steps(ONE, model, range(3, 6))
    assert losses == pytest.approx(one[f'checkpoint_{kind}']['losses'][3:], rel=1e-5)


def test_nothing_is_unpickled_from_the_parts_of_a_checkpoint(two, folder, tmp_path):
    """A hostile `.metadata` among the parts, where PyTorch's own format keeps its pickle, is not looked at; a torn part is refused."""
    source = folder / 'checkpoint_full' / 'full' / 'fsdp2-native' / 'half'
    copied = shutil.copytree(source, tmp_path / 'half')
    parts = copied / 'training_state_shards'
    bomb = tmp_path / 'ran'
    assert [path for path in parts.iterdir() if path.suffix != '.safetensors'] == []

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (bomb,))

    (parts / '.metadata').write_bytes(pickle.dumps(Bomb()))
    parameters = [('lm_head.weight', torch.nn.Parameter(torch.zeros(64, 32)))]
    kept = load_training_state(copied, 'training_state', parameters)
    assert not bomb.exists()
    assert kept['optimizer']['state']['lm_head.weight']['exp_avg'].abs().sum() > 0
    next(parts.glob('*.safetensors')).write_bytes(b'torn')
    with pytest.raises(CheckpointError, match='cannot be read'):
        load_training_state(copied, 'training_state', parameters)
    shutil.rmtree(parts)
    with pytest.raises(CheckpointError, match='incomplete'):
        load_training_state(copied, 'training_state', parameters)
