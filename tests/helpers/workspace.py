"""The workspace as tests see it: its packages, their modules, what these import, and nox's sessions."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it there
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Package:
    """One distribution of the workspace."""

    folder: Path

    @cached_property
    def pyproject(self) -> dict[str, Any]:
        """Its `pyproject.toml`."""
        return tomllib.loads((self.folder / 'pyproject.toml').read_text())

    @cached_property
    def project(self) -> dict[str, Any]:
        """The table `[project]`."""
        return self.pyproject['project']

    @property
    def name(self) -> str:
        """The distribution's name."""
        return self.project['name']

    @property
    def path(self) -> str:
        """Its folder, seen from the root."""
        return self.folder.relative_to(ROOT).as_posix()

    @cached_property
    def source(self) -> Path:
        """The folder of its one import package."""
        (source,) = (init.parent for init in (self.folder / 'src').glob('*/__init__.py'))
        return source

    @property
    def modules(self) -> list[Path]:
        """All its modules."""
        return sorted(self.source.rglob('*.py'))

    def module_name(self, path: Path) -> str:
        """`package.module` of a file."""
        parts = path.relative_to(self.source.parent).with_suffix('').parts
        return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)

    @property
    def entry_points(self) -> set[tuple[str, str, str]]:
        """Group, name and target of each entry point that it declares."""
        groups = {'console_scripts': self.project.get('scripts', {}), **self.project.get('entry-points', {})}
        return {(group, name, target) for group, points in groups.items() for name, target in points.items()}

    @property
    def requirements(self) -> list[str]:
        """What it needs, extras included."""
        optional = self.project.get('optional-dependencies', {}).values()
        return [*self.project.get('dependencies', []), *(need for needs in optional for need in needs)]


def packages() -> list[Package]:
    """Every distribution of the workspace, core first."""
    found = [*ROOT.glob('twinkle_*/pyproject.toml'), *ROOT.glob('plugins/*/pyproject.toml')]
    return sorted(
        (Package(path.parent) for path in found), key=lambda package: (package.name != 'twinkle-core', package.name)
    )


@dataclass(frozen=True)
class Import:
    """One module that a file imports, and where: at its `top`, in a `function`, or for `typing` only."""

    module: str
    where: str
    line: int


def imports_of(path: Path) -> list[Import]:
    """All imports of a file, by statement or by `importlib.import_module('name')`."""
    return list(_imports(ast.parse(path.read_text()), 'top'))


def _imports(node: ast.AST, where: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, where, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f'line {child.lineno}: imports are absolute here'
            # `from twinkle import registry` imports a module or takes a name; the longer reading is the one to judge.
            names = [alias.name for alias in child.names] if child.module == 'twinkle' else ['']
            yield from (Import(f'{child.module}.{name}'.rstrip('.'), where, child.lineno) for name in names)
        elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith('import_module') and child.args:
            if isinstance(child.args[0], ast.Constant):
                yield Import(str(child.args[0].value), 'function', child.lineno)
        inner = where
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inner = 'function'
        elif isinstance(child, ast.If) and 'TYPE_CHECKING' in ast.unparse(child.test):
            inner = 'typing'
        yield from _imports(child, inner)


def sessions() -> list[str]:
    """The names of noxfile.py's sessions."""
    tree = ast.parse((ROOT / 'noxfile.py').read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any('nox.session' in ast.unparse(d) for d in node.decorator_list)
    ]


def noxfile_list(name: str) -> list[str]:
    """A constant list of noxfile.py."""
    for node in ast.parse((ROOT / 'noxfile.py').read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)
