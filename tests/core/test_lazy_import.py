"""`import twinkle` is light, and its public names are what they say."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import twinkle


def _run(code):
    return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout


def test_importing_twinkle_loads_no_torch_and_no_plugin():
    """Neither PyTorch nor data libraries nor any plugin is imported, and no metadata is read."""
    heavy = (
        'torch',
        'numpy',
        'datasets',
        'transformers',
        'pluggy',
        'importlib_metadata',
        'twinkle_hf',
        'twinkle.registry',
    )
    out = _run(f'import sys, twinkle; print([m for m in {heavy!r} if m in sys.modules])')
    assert out.strip() == '[]'


def test_importing_twinkle_installs_no_log_handler():
    """What is shown of the log is the application's choice."""
    out = _run(
        'import logging, twinkle; twinkle.get_logger().info("x"); print(logging.getLogger("twinkle").handlers, logging.root.handlers)'
    )
    assert out.strip() == '[] []'


@pytest.mark.parametrize('name', twinkle.__all__)
def test_every_public_name_is_there(name):
    """What `__all__` promises can be had."""
    assert getattr(twinkle, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    """Typos are not swallowed by lazy loading."""
    with pytest.raises(AttributeError, match='no_such'):
        twinkle.no_such


@pytest.mark.parametrize(
    'module', ['twinkle.loss', 'twinkle.metric', 'twinkle.template', 'twinkle.processor', 'twinkle.hub']
)
def test_a_registry_kind_does_not_hide_the_module_of_its_parts(module):
    """Modules are importable beside registries of similar names."""
    assert importlib.import_module(module).__all__
