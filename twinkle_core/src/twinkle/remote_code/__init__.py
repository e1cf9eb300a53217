"""Plugin code from a hub or a folder: run after opting in only, under a module name of its own.

An address is `hf://org/repo`, `ms://org/repo` (any scheme of the registry `sources`), a folder or a `.py` file, with `:Name` behind it
where the code holds several parts of the kind; a hub's commit goes behind the repository: `hf://org/repo@commit:Name`. A folder is
read as a package: `__init__.py`, or `plugin.py` if there is none, and relative imports between its files.

The module's name is made from the place and the content of the code, so that two folders (or two versions of one) live side by
side. This module is the package that holds them; a spawned worker that unpickles an object of theirs finds them through it, too.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.util
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from twinkle.errors import ConfigError, InvalidPartError, PluginLoadError, SourceError, UntrustedCodeError
from twinkle.logging import get_logger

if TYPE_CHECKING:
    from twinkle.registry import Registry

__all__ = ['PLACES', 'TRUST', 'load_part']

TRUST = 'TWINKLE_TRUST_REMOTE_CODE'
PLACES = 'TWINKLE_CODE_PLACES'
"""Where a parent process has loaded code from, for the workers that it starts."""

MOST_FILES = 1000
_ENTRY_FILES = ('__init__.py', 'plugin.py')
_ADDRESS = re.compile(r'(?P<place>.+?)(:(?P<name>[^\W\d][\w.]*))?')
_FETCHED = ['*.py', '*.json']

_lock = threading.Lock()  # never held during an import
logger = get_logger('twinkle.remote_code')


def load_part(kind: Registry, address: str, *, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """Load the part of this kind from an address.

    Raises:
        UntrustedCodeError: neither `trust_remote_code` nor `TWINKLE_TRUST_REMOTE_CODE=1` is given. Nothing was fetched or run.
        SourceError: there is no such place, or no Python code in it.
        PluginLoadError: the code cannot be loaded; nothing of it stays behind.
        InvalidPartError: it holds no part of this kind, or several and no `:Name`.
        ConfigError: a revision for a local folder.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise SourceError(f'{address!r} is no address of plugin code.')
    place, name = match['place'], match['name']
    is_local = '://' not in place
    if is_local and not Path(place).expanduser().exists():
        raise SourceError(f'{place!r}: there is no such file or folder ({Path(place).expanduser().absolute()}).')
    if not (trust_remote_code or os.environ.get(TRUST, '').lower() in ('1', 'true', 'yes', 'on')):
        pin = '' if is_local else f' Pin the commit that you have read: {place.partition("@")[0]}@<commit>.'
        raise UntrustedCodeError(
            f'{address!r} is Python code, which would run with all your rights: it could read your files and keys, and change them. '
            f'Read it first. To run it, pass trust_remote_code=True, or set {TRUST}=1 for all such code.{pin}'
        )
    module = _load(_entry_file(_local(place, revision)), address)
    return _pick(kind, module, name, address)


def _local(place: str, revision: str | None) -> Path:
    if '://' not in place:
        path = Path(place).expanduser()
        if revision is not None:
            raise ConfigError(f'revision={revision!r}: {place!r} is a local path, which has no revisions.')
        return path.resolve()
    from twinkle.hub import fetch

    if revision is None and '@' not in place:
        logger.warning(
            '%s is not pinned: its code may change. Pin the commit that you have read: %s@<commit>', place, place
        )
    return Path(fetch(place, revision=revision, allow_patterns=_FETCHED)).resolve()


def _entry_file(path: Path) -> Path:
    if path.is_file():
        if path.suffix == '.py':
            return path
        raise SourceError(f'{path} is no Python file. Give a .py file, or a folder with {" or ".join(_ENTRY_FILES)}.')
    for name in _ENTRY_FILES:
        if (path / name).is_file():
            return path / name
    raise SourceError(f'{path} holds no plugin code: there is neither {" nor ".join(_ENTRY_FILES)}.')


@dataclass(frozen=True)
class _Place:
    """Code on disk: its first file, and whether its folder is a package."""

    file: Path

    @property
    def is_package(self) -> bool:
        return self.file.name in _ENTRY_FILES

    def files(self) -> list[Path]:
        """All Python files that belong to it."""
        if not self.is_package:
            return [self.file]
        found = []
        for path in self.file.parent.rglob('*.py'):
            found.append(path)
            if len(found) > MOST_FILES:
                raise SourceError(
                    f'{self.file.parent} holds more than {MOST_FILES} Python files; it is no folder of plugin code.'
                )
        return sorted(found)

    def digest(self) -> str:
        """A name for this code at this place, with this content."""
        sum_ = hashlib.sha256(str(self.file).encode())
        for path in self.files():
            sum_.update(f'\0{path}\0{path.stat().st_size}\0'.encode())
            sum_.update(path.read_bytes())
        return f'c{sum_.hexdigest()[:16]}'


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `twinkle.remote_code.c<digest>` at the place that this process, or the one that started it, has opted in to."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, name = fullname.rpartition('.')
        file = _places().get(name) if parent == __name__ else None
        if file is None:
            return None
        place = _Place(Path(file))
        if not place.file.is_file() or place.digest() != name:
            raise ImportError(f'The code at {file} has changed, or is gone, since it was loaded.', name=fullname)
        locations = [str(place.file.parent)] if place.is_package else None
        return importlib.util.spec_from_file_location(fullname, place.file, submodule_search_locations=locations)


def _places() -> dict[str, str]:
    text = os.environ.get(PLACES)
    return dict(json.loads(text)) if text else {}


def _announce(digest: str, file: Path | None) -> None:
    """Write down, or strike out, where code is."""
    with _lock:
        places = {key: path for key, path in _places().items() if key != digest}
        if file is not None:
            places[digest] = str(file)
        if places:
            os.environ[PLACES] = json.dumps(places)
        else:
            os.environ.pop(PLACES, None)


def _load(file: Path, address: str) -> ModuleType:
    digest = _Place(file).digest()
    full = f'{__name__}.{digest}'
    known = digest in _places()
    if not known:
        _announce(digest, file)
    try:
        with _clean_after_failure(full, file.parent):
            return importlib.import_module(full)  # Python's own lock: one import, however many threads ask
    except (Exception, SystemExit) as error:
        if not known:
            _announce(digest, None)
        raise PluginLoadError(
            f'The code of {address!r} ({file}) cannot be loaded: {type(error).__name__}: {error}. Nothing of it was kept. Files of the '
            'folder import each other by relative imports (from .other import x).'
        ) from error


@contextmanager
def _clean_after_failure(full: str, folder: Path) -> Iterator[None]:
    """Take out of `sys.path` and `sys.modules` what code that failed has left there; other modules that it imported are kept."""
    path, modules = list(sys.path), set(sys.modules)
    try:
        yield
    except BaseException:
        sys.path[:] = [entry for entry in sys.path if entry in path]
        for name in set(sys.modules) - modules:
            module_file = getattr(sys.modules.get(name), '__file__', None)
            if (
                name == full
                or name.startswith(f'{full}.')
                or (module_file and Path(module_file).is_relative_to(folder))
            ):
                sys.modules.pop(name, None)
        raise


def _pick(kind: Registry, module: ModuleType, name: str | None, address: str) -> Any:
    own = {
        key: value
        for key, value in vars(module).items()
        if not key.startswith('_')
        and (callable(value) if kind.functions else isinstance(value, type))
        and getattr(value, '__module__', '').startswith(module.__name__)
    }
    public = getattr(module, '__all__', None)
    fitting = sorted(key for key, value in own.items() if (public is None or key in public) and kind.fits(value))
    if name is None:
        if len(fitting) != 1:
            found = f'several of them ({", ".join(fitting)})' if fitting else 'none'
            ways = (
                f'write {address}:{fitting[0]}, say'
                if fitting
                else f'it defines: {", ".join(sorted(own)) or "nothing"}'
            )
            raise InvalidPartError(f'{address!r} should hold one part of {kind.kind}, and holds {found}; {ways}.')
        return own[fitting[0]]
    found_part: Any = module
    for step in name.split('.'):
        try:
            found_part = getattr(found_part, step)
        except AttributeError as error:
            raise PluginLoadError(
                f'{address!r}: there is no {name!r} in {module.__file__}. Parts of {kind.kind} in it: {", ".join(fitting) or "none"}.'
            ) from error
    return kind.check(found_part, name=address)


sys.meta_path.append(_Finder())

if hasattr(os, 'register_at_fork'):

    def _new_lock() -> None:
        global _lock
        _lock = threading.Lock()

    os.register_at_fork(after_in_child=_new_lock)
