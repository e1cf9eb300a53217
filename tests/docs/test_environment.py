"""docs/environment.md lists the environment variables that the packages use: all of them, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NAME = re.compile(r'[A-Z][A-Z0-9_]{3,}')


def _modules() -> Iterator[Path]:
    for package in (*ROOT.glob('twinkle_*'), *(ROOT / 'plugins').glob('*')):
        yield from sorted((package / 'src').rglob('*.py'))


def _variables(module: Path) -> set[str]:
    """Upper-case strings of a module that uses `os.environ` or `os.getenv`; elsewhere those that start with TWINKLE_."""
    text = module.read_text()
    nodes = [
        node
        for statement in ast.parse(text).body
        if not (isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == '__all__')
        for node in ast.walk(statement)
    ]
    shown_in_help = {id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == 'metavar'}
    names = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and _NAME.fullmatch(node.value)
        and id(node) not in shown_in_help
    }
    return {name for name in names if name.startswith('TWINKLE_') or 'environ' in text or 'getenv' in text}


def test_the_page_lists_every_variable_and_no_other() -> None:
    """The first column of its tables is what the source uses."""
    page = (ROOT / 'docs' / 'environment.md').read_text()
    first_column = re.findall(r'^\| (`[^|]+`) \|', page, re.MULTILINE)
    listed = [name for cell in first_column for name in re.findall(r'`([A-Z0-9_]+)`', cell)]
    assert len(listed) == len(set(listed))
    used = {name: module for module in _modules() for name in _variables(module)}
    missing = {name: str(module.relative_to(ROOT)) for name, module in used.items() if name not in listed}
    assert not missing, 'add them to docs/environment.md'
    assert not set(listed) - set(used), 'nothing uses them any more: remove them from docs/environment.md'
