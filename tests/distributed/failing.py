"""A loop of two ranks in which the second one fails in the third step. Run by torchrun."""

from __future__ import annotations

import sys

from tests.helpers import reference
from twinkle import DeviceMesh
from twinkle.errors import DataError
from twinkle.launcher import rank
from twinkle.model import TransformersModel
from twinkle.runtime import initialize

if __name__ == '__main__':
    sizes = {name: int(size) for name, size in (text.split('=') for text in sys.argv[2:])}
    with initialize(global_device_mesh=DeviceMesh.from_sizes(**sizes, device_type='cpu'), timeout=300):
        model = TransformersModel(sys.argv[1], mixed_precision='no', strategy='native_fsdp')
        model.set_optimizer('SGD', lr=0.1)
        for step in range(5):
            rows = reference.random_rows(2, seed=step)
            if step == 2 and rank() == 1:
                raise DataError('row 7 of shard 3 cannot be read')
            model.forward_backward(inputs=rows)
            model.clip_grad_and_step()
            print(f'rank {rank()} step {step}', flush=True)
