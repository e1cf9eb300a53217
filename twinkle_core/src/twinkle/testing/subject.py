"""The backend under test, and how the kit makes models of it.

By default a model is `target(model_id=<folder>)`, with `mixed_precision='no'` where the constructor knows the keyword; the folder
holds a tiny random Llama, adapters are LoRA folders for it, and optimizer and schedule are asked for by the names 'SGD' and
'StepLR'. A backend for other models, or with other names, offers any of these class methods:

    conformance_model(folder) -> model               the same weights each time, fp32, no dropout, a vocabulary of at least 64 tokens;
                                                     `folder` is for files
    conformance_adapter(folder, seed) -> config      what `add_adapter_to_model` takes; another function for every seed
    conformance_optimizer(model, lr, adapter_name)   sets plain SGD: w - lr * gradient
    conformance_scheduler(model, adapter_name)       sets a schedule that halves the learning rate with every optimizer step
"""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle import launcher
from twinkle.errors import ConfigError
from twinkle.testing.tiny_llama import write_lora, write_tiny_llama

if TYPE_CHECKING:
    from twinkle.data_format import InputFeature
    from twinkle.model.protocol import TwinkleModel

__all__ = ['VOCABULARY', 'Subject']

VOCABULARY = 64
"""Token ids of the kit's rows are below this."""


class Subject:
    """A backend under test.

    Args:
        spec: `package.module:Name` of a model class, or of a function that returns a model.
        folder: for files; with several ranks the same on all of them.
    """

    def __init__(self, spec: str, folder: Path) -> None:
        self.target = _load(spec)
        self.folder = folder
        self._count = 0
        self.rank = launcher.rank()
        self.ranks = launcher.world_size()

    @cached_property
    def cannot(self) -> Mapping[str, str]:
        """Methods that the backend declares it cannot carry out (here: an instance may add to its class), with the reasons."""
        return getattr(self.model(), 'cannot', {})

    def model(self) -> TwinkleModel:
        """A new model, always with the same weights."""
        if hasattr(self.target, 'conformance_model'):
            return self.target.conformance_model(self._own('model'))  # type: ignore[no-any-return]
        constructor: Any = self.target.__init__ if isinstance(self.target, type) else self.target  # type: ignore[misc]
        keywords = {'mixed_precision': 'no'} if 'mixed_precision' in inspect.signature(constructor).parameters else {}
        return self.target(model_id=str(self._llama()), **keywords)  # type: ignore[no-any-return]

    def adapter(self, seed: int = 0) -> Any:
        """What `add_adapter_to_model` takes, for an adapter that is not the identity."""
        if hasattr(self.target, 'conformance_adapter'):
            return self.target.conformance_adapter(self._own('adapter'), seed)
        return str(write_lora(self._own(f'lora-{seed}'), self._llama(), seed=seed))

    def with_adapters(self, *names: str) -> TwinkleModel:
        """A new model with an adapter of each name, each another function."""
        model = self.model()
        for seed, name in enumerate(names):
            model.add_adapter_to_model(name, self.adapter(seed))
        return model

    def set_sgd(self, model: TwinkleModel, lr: float, adapter_name: str | None = None) -> None:
        """Plain SGD, with which the gradient that was applied can be read off the weights."""
        if hasattr(self.target, 'conformance_optimizer'):
            self.target.conformance_optimizer(model, lr, adapter_name)
        else:
            model.set_optimizer('SGD', adapter_name=adapter_name, lr=lr)

    def set_halving(self, model: TwinkleModel, adapter_name: str | None = None) -> None:
        """A schedule that halves the learning rate with every step."""
        if hasattr(self.target, 'conformance_scheduler'):
            self.target.conformance_scheduler(model, adapter_name)
        else:
            model.set_lr_scheduler('StepLR', adapter_name=adapter_name, step_size=1, gamma=0.5)

    def shared(self, name: str) -> Path:
        """A new folder that all ranks name alike, for what `save` writes."""
        self._count += 1
        return self.folder / f'{self._count}-{name}'

    def barrier(self) -> None:
        """Wait for the other ranks."""
        if self.ranks > 1:
            import torch.distributed as dist

            dist.barrier()

    @staticmethod
    def rows(count: int, seed: int = 0) -> list[InputFeature]:
        """Rows of unequal lengths, of which the first part is not trained on; labels are shifted, as templates do."""
        rng = random.Random(seed)
        rows: list[InputFeature] = []
        for _ in range(count):
            ids = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(4, 12))]
            prompt = rng.randint(1, len(ids) // 2)
            rows.append({'input_ids': ids, 'labels': [*([-100] * (prompt - 1)), *ids[prompt:], -100]})
        return rows

    def _own(self, name: str) -> Path:
        folder = self.folder / f'rank-{self.rank}' / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _llama(self) -> Path:
        folder = self._own('llama')
        return folder if (folder / 'config.json').exists() else write_tiny_llama(folder)


def _load(spec: str) -> Any:
    module, separator, name = spec.partition(':')
    if not separator or not module or not name:
        raise ConfigError(f'--twinkle-model {spec!r} must be package.module:Name, for example my_pkg.model:MyModel.')
    try:
        target: Any = importlib.import_module(module)
        for part in name.split('.'):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f'--twinkle-model {spec!r} cannot be loaded: {error}') from error
    return target
