"""Distributions made up for a test: a `dist-info` folder and modules, on a path of their own."""

from __future__ import annotations

from pathlib import Path


def make_dist(
    folder: Path,
    name: str,
    entry_points: dict[str, dict[str, str]],
    *,
    version: str = '1.0',
    modules: dict[str, str] | None = None,
    requires: list[str] | None = None,
) -> Path:
    """Install a distribution into `folder`: its metadata, its entry points by group, its modules by name."""
    folder.mkdir(parents=True, exist_ok=True)
    info = folder / f'{name.replace("-", "_")}-{version}.dist-info'
    info.mkdir(exist_ok=True)
    needs = ''.join(f'Requires-Dist: {need}\n' for need in requires or [])
    (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}')
    lines = [
        line
        for group, points in entry_points.items()
        for line in (f'[{group}]', *(f'{key} = {target}' for key, target in points.items()), '')
    ]
    (info / 'entry_points.txt').write_text('\n'.join(lines))
    for module, code in (modules or {}).items():
        (folder / f'{module}.py').write_text(code)
    return folder


LOSS = """
from twinkle.data_format import LossOutput
from twinkle.loss import Loss


class {name}(Loss):
    def __call__(self, inputs, outputs, **kwargs):
        return LossOutput(loss_sum=outputs['logps'].sum(), count=1)
"""
"""The code of a module with one loss; format it with its class's name."""
