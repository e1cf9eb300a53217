"""What goes wrong on one rank ends all of them soon, and is named; what a mesh cannot do is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.helpers.launch import torchrun
from tests.helpers.models import tiny_dir, tiny_llama_dir


@pytest.mark.parametrize('sizes', ['dp_size=2', 'fsdp_size=2'])
def test_an_error_on_one_rank_ends_all(tmp_path, sizes):
    """The launch ends with the failing rank's own error long before the collective timeout; nobody is left waiting."""
    source = tiny_llama_dir(tmp_path / 'llama')
    start = time.monotonic()
    done = torchrun(2, Path(__file__).with_name('failing.py'), source, sizes, timeout=200)
    assert time.monotonic() - start < 120
    assert done.returncode != 0
    assert 'DataError: row 7 of shard 3 cannot be read' in done.stderr
    assert 'rank 0 step 1' in done.stdout
    assert 'rank 0 step 2' not in done.stdout


REFUSALS = r"""
import sys
import pytest
import torch
from peft import LoraConfig
from twinkle import DeviceMesh
from twinkle.errors import ConfigError, MeshError, NotSupportedError
from twinkle.model import TransformersModel
from twinkle.runtime import initialize

source, bert = sys.argv[1:]
cpu = {'device_type': 'cpu'}
data, shards = DeviceMesh.from_sizes(dp_size=2, **cpu), DeviceMesh.from_sizes(fsdp_size=2, **cpu)
split, halves = DeviceMesh.from_sizes(dp_size=2, ulysses_size=2, **cpu), DeviceMesh.from_sizes(tp_size=2, **cpu)


def make(mesh, model_id=source, strategy='native_fsdp', **options):
    return TransformersModel(model_id, mixed_precision='no', device_mesh=mesh, strategy=strategy, **options)


def refused(error, told, call, *args, **options):
    with pytest.raises(error, match=told):
        call(*args, **options)


with initialize(timeout=60):
    refused(MeshError, 'twinkle-megatron', make, DeviceMesh.from_sizes(pp_size=2, **cpu))
    refused(MeshError, 'ring attention', make, DeviceMesh.from_sizes(cp_size=2, **cpu))
    refused(MeshError, r'ulysses_size=2 must divide the 3 attention heads', make, split, bert)
    refused(MeshError, "need strategy='native_fsdp'", make, halves, strategy='accelerate')
    refused(ConfigError, r"has no \['bucket'\].*bucket_cap_mb", train := lambda: (
        (model := make(data, strategy='accelerate', ddp_config={'bucket': 1})).set_optimizer('SGD', lr=0.1),
        model.forward_backward({'input_ids': [1, 2], 'labels': [2, -100]})))
    refused(ConfigError, r"has no \['reshard'\] with strategy='native_fsdp'.*reshard_after_forward", make, shards, fsdp_config={'reshard': 1})
    refused(ConfigError, r"has no \['reshard'\] with strategy='accelerate'", make, shards, strategy='accelerate', fsdp_config={'reshard': 1})
    refused(ConfigError, 'no module of the classes', make, shards, fsdp_config={'wrap': ['NoSuchLayer']})
    refused(NotSupportedError, 'ddp_config is for', make, shards, ddp_config={})
    refused(NotSupportedError, 'fsdp_config is for a mesh that shards', make, data, fsdp_config={})
    refused(NotSupportedError, 'memory_efficient_init', make, data, memory_efficient_init=True)
    refused(MeshError, 'Transformers cannot spread this model', make, DeviceMesh.from_sizes(dp_size=2, ep_size=2, **cpu))
    model = make(shards)
    for options in ({'use_dora': True}, {'modules_to_save': ['lm_head']}, {'bias': 'all'}, {'init_lora_weights': 'pissa'}):
        config = LoraConfig(r=2, target_modules=['q_proj'], **options)
        refused(NotSupportedError, next(iter(options)), model.add_adapter_to_model, 'one', config)
    model.add_adapter_to_model('one', LoraConfig(r=2, target_modules=['q_proj']))
    model.set_optimizer('SGD', lr=0.1)
    refused(NotSupportedError, 'Leave async_save out', model.save, 'x', '.', save_optimizer=True, async_save=True)
print('all refused')
"""


def test_what_a_mesh_cannot_do_is_refused(tmp_path):
    """Each is a named error with the way out, on both ranks, and what was refused changes nothing."""
    source = tiny_llama_dir(tmp_path / 'llama')
    heads = tiny_dir('qwen2', tmp_path / 'heads', num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    script = tmp_path / 'refusals.py'
    script.write_text(REFUSALS)
    done = torchrun(2, script, source, heads)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count('all refused') == 2


FULL_DISK = r"""
import sys
from pathlib import Path
from twinkle import DeviceMesh, checkpoint
from twinkle.errors import CheckpointError
from twinkle.launcher import rank
from twinkle.model import TransformersModel
from twinkle.runtime import initialize

source, folder = sys.argv[1], Path(sys.argv[2])
with initialize(timeout=60):
    mesh = DeviceMesh.from_sizes(fsdp_size=2, device_type='cpu')
    model = TransformersModel(source, mixed_precision='no', device_mesh=mesh, strategy='native_fsdp')
    model.set_optimizer('AdamW', lr=0.1)
    rows = [{'input_ids': [1, 2, 3], 'labels': [2, 3, -100]}]
    model.forward_backward(rows)
    model.clip_grad_and_step()
    model.save('good', folder, save_optimizer=True)
    save_state = checkpoint.save_state

    def failing(where, stem, state):
        if rank() == 1 and stem.startswith('rng'):
            raise OSError(28, 'No space left on device')
        return save_state(where, stem, state)

    checkpoint.save_state = failing
    try:
        model.save('bad', folder, save_optimizer=True)
    except (OSError, CheckpointError) as error:
        print(f'rank {rank()}: {type(error).__name__}: {error}', flush=True)
    checkpoint.save_state = save_state
    model.resume_from_checkpoint(folder)
    model.save('better', folder, save_optimizer=True)
"""


def test_a_rank_that_cannot_write_spoils_no_checkpoint(tmp_path):
    """Its own error there, one that names it on the others; nothing of the checkpoint is left, `latest` is the older one, and all go on."""
    source = tiny_llama_dir(tmp_path / 'llama')
    script = tmp_path / 'full_disk.py'
    script.write_text(FULL_DISK)
    done = torchrun(2, script, source, str(tmp_path / 'out'))
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'rank 1: OSError: [Errno 28] No space left on device' in done.stdout
    assert 'rank 0: CheckpointError: Rank 1 could not write the checkpoint: OSError' in done.stdout
    assert sorted(path.name for path in (tmp_path / 'out').iterdir() if path.is_dir()) == ['better', 'good']
    assert (tmp_path / 'out' / 'latest').read_text().strip() == 'better'
