"""`twinkle plugins new`: a package that can be installed and tested as it is written."""

from __future__ import annotations

import keyword
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from twinkle import __version__
from twinkle.errors import ConfigError, NameNotAllowedError

__all__ = ['write_package']

_PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "{dist}"
version = "0.1.0"
description = "Parts for Twinkle"
readme = "README.md"
requires-python = ">=3.10"
dependencies = ["twinkle-core>={version},<{next}"]

[project.entry-points."twinkle.losses"]
{name}_loss = "{module}:{title}Loss"

[project.entry-points."twinkle.patches"]
{name}_patch = "{module}:{title}Patch"

# Which plugin API this was written for; see twinkle.PLUGIN_API.
[project.entry-points."twinkle.plugin_api"]
v1 = "{module}"

[tool.hatch.build.targets.wheel]
packages = ["src/{module}"]
"""

_README = """\
# {dist}

A loss and a patch for Twinkle.

```
pip install -e .
pytest
twinkle plugins show {name}_loss
```

Then, in a training script: `model.set_loss('{name}_loss')`, `model.apply_patch('{name}_patch')`.

After a change to the entry points in `pyproject.toml`, install again: they are metadata.
"""

_MODULE = '''\
"""Parts for Twinkle. Their names are entry points in pyproject.toml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from twinkle.data_format import IGNORE_INDEX, LossOutput, ModelOutput
from twinkle.loss import Loss
from twinkle.patch import Patch

__all__ = ['{title}Loss', '{title}Patch']


class {title}Loss(Loss):
    """Cross entropy from log-probabilities, scaled. Put your own formula here.

    A loss returns a sum and what it counts, never a mean; `requires` says what the forward pass must compute.
    """

    requires = frozenset({{'logps'}})

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, inputs: Mapping[str, Any], outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        kept = inputs['labels'] != IGNORE_INDEX
        return LossOutput(loss_sum=-self.scale * (outputs['logps'] * kept).sum(), count=kept.sum())


class {title}Patch(Patch):
    """Freezes the biases of a model. Put your own change here; a patch changes everything it means to, or nothing."""

    def __call__(self, model: nn.Module, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith('bias'):
                parameter.requires_grad_(False)
'''

_TESTS = '''\
"""The parts are found by name, and do what they say."""

import pytest
import torch
from torch import nn
from twinkle.registry import losses, patches


def test_the_loss_is_scaled_cross_entropy():
    """Equal to PyTorch's own, times the scale; -100 counts nothing."""
    logits = torch.randn(2, 3, 5, requires_grad=True)
    labels = torch.tensor([[1, 2, -100], [4, -100, 0]])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='sum')
    logps = -nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='none').view(2, 3)
    result = losses.build('{name}_loss', scale=2.0)({{'labels': labels}}, {{'logps': logps}})
    assert float(result.loss_sum) == pytest.approx(2 * float(expected))
    assert int(result.count) == 4


def test_the_patch_freezes_biases():
    """Biases no longer require gradients; weights do."""
    model = nn.Linear(2, 2)
    patches.build('{name}_patch')(model)
    assert not model.bias.requires_grad
    assert model.weight.requires_grad
'''


def write_package(dist: str, parent: Path) -> tuple[Path, list[str]]:
    """Write the package `dist` into a new folder of `parent`.

    Returns:
        The folder, and the files in it.

    Raises:
        NameNotAllowedError: no distribution can have that name, or its module would hide another one.
        ConfigError: the folder exists already. Nothing has been written.
    """
    if not re.fullmatch(r'[A-Za-z][A-Za-z0-9]*([-_.]?[A-Za-z0-9]+)*', dist):
        raise NameNotAllowedError(
            f'{dist!r} is no name for a distribution: use letters, digits and single "-", beginning with a letter.'
        )
    module = re.sub(r'[-.]', '_', dist).lower()
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or find_spec(module) is not None:
        raise NameNotAllowedError(
            f'{dist!r} would bring a module {module!r}, which is taken: by Python itself, or by a package that is installed. Choose '
            'another name.'
        )
    folder = parent / dist
    if folder.exists():
        raise ConfigError(f'{folder} exists already. Choose another name, or another --folder.')
    name = module.removeprefix('twinkle_') or module
    major, minor = __version__.split('.')[:2]
    words = {
        'dist': dist,
        'module': module,
        'name': name,
        'title': ''.join(part.capitalize() for part in name.split('_')),
        'version': f'{major}.{minor}',
        'next': f'{major}.{int(minor) + 1}',
    }
    files = {
        'pyproject.toml': _PYPROJECT,
        'README.md': _README,
        f'src/{module}/__init__.py': _MODULE,
        f'src/{module}/py.typed': '',
        f'tests/test_{module}.py': _TESTS,
    }
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.format(**words), encoding='utf-8')
    return folder, sorted(files)
