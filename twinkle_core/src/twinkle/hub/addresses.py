"""From an address, `scheme://rest@revision`, `org/name` or a path, to a local folder."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from twinkle.errors import ConfigError, MissingPackageError, MissingPartError, SourceError, UnknownNameError
from twinkle.hub.source import Kind

__all__ = ['cache_folder', 'fetch', 'resolve_dataset', 'resolve_model', 'split_address']

DEFAULT_HUB = 'hf'

_ADDRESS = re.compile(r'(?P<scheme>[A-Za-z][A-Za-z0-9_-]*)://(?P<rest>[^@]+)(@(?P<revision>.+))?')
_BARE = re.compile(r'[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@.+)?', re.ASCII)
# `data/train.jsonl` is a path, `Qwen/Qwen2.5-0.5B` is not: a dot alone does not tell.
_FILE = re.compile(r'.*\.(arrow|bin|csv|gguf|gz|json|jsonl|parquet|pt|pth|py|safetensors|tsv|txt|ya?ml|zip|zst)', re.I)


def cache_folder() -> Path:
    """Where converted and fetched files are kept: `TWINKLE_CACHE`, else `twinkle` in the user's cache folder. It is created.

    Raises:
        SourceError: it cannot be created.
    """
    given = os.environ.get('TWINKLE_CACHE')
    folder = Path(given).expanduser().absolute() if given else _user_cache() / 'twinkle'
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SourceError(
            f'The cache folder {folder} cannot be made ({error}); set TWINKLE_CACHE to another.'
        ) from error
    return folder


def _user_cache() -> Path:
    """Each platform's own place; `XDG_CACHE_HOME` goes before it (the standard says that relative ones do not count)."""
    chosen = Path(os.environ.get('XDG_CACHE_HOME') or '')
    if chosen.is_absolute():
        return chosen
    if sys.platform == 'darwin':
        return Path.home() / 'Library' / 'Caches'
    if sys.platform == 'win32' and os.environ.get('LOCALAPPDATA'):
        return Path(os.environ['LOCALAPPDATA'])
    return Path.home() / '.cache'


def split_address(address: str) -> tuple[str, str, str | None] | None:
    """Scheme, rest and revision of `scheme://rest@revision`; None if it has no scheme."""
    match = _ADDRESS.fullmatch(address)
    return None if match is None else (match['scheme'], match['rest'].strip('/'), match['revision'])


def fetch(
    address: str, *, kind: Kind = 'model', revision: str | None = None, allow_patterns: list[str] | None = None
) -> Path:
    """Fetch `scheme://rest` through the source of its scheme.

    Raises:
        SourceError: there is no scheme, no source of that scheme, or nothing there.
        MissingPackageError: the source's package is not installed.
    """
    from twinkle.registry import sources

    parts = split_address(address)
    if parts is None:
        raise SourceError(f'{address!r} is no address; write scheme://name[@revision]. Known schemes: {_known()}.')
    scheme, rest, at = parts
    if at is not None and revision is not None and at != revision:
        raise SourceError(f'{address!r} names revision {at!r}, and revision={revision!r} was given too.')
    try:
        source = sources.build(scheme)
    except MissingPartError:
        raise  # says what to install
    except UnknownNameError as error:
        raise SourceError(f'{address!r}: unknown scheme {scheme!r}. Known schemes: {_known()}.') from error
    if kind not in source.kinds:
        raise SourceError(f'{address!r}: {scheme}:// brings {" and ".join(source.kinds)}s, no {kind}s.')
    found = Path(
        source.fetch(rest, kind=kind, revision=at if revision is None else revision, allow_patterns=allow_patterns)
    )
    if not found.exists():
        raise SourceError(
            f'{address!r}: {type(source).__name__} returned {found}, and there is no such file or folder.'
        )
    return found


def resolve_model(model_id: str | Path, *, revision: str | None = None) -> str:
    """The local folder of a model: a path that exists, else what its scheme fetches, else `org/name` at the default hub.

    The default hub is Hugging Face (`hf`), or the scheme in `TWINKLE_DEFAULT_HUB`.

    Raises:
        SourceError: nothing there.
        MissingPackageError: the source's package is not installed.
        ConfigError: a revision for a local path.
    """
    return str(_resolve(model_id, 'model', revision))


def resolve_dataset(dataset_id: str | Path, *, revision: str | None = None) -> str:
    """The local file or folder of a data set, found as `resolve_model` finds models."""
    return str(_resolve(dataset_id, 'dataset', revision))


def _resolve(name: str | Path, kind: Kind, revision: str | None) -> Path:
    text = str(name)
    path = Path(text).expanduser()
    if text and _exists(path):
        if revision is not None:
            raise ConfigError(f'revision={revision!r}: {text!r} is a local path, which has no revisions.')
        return path
    if split_address(text) is not None:
        return fetch(text, kind=kind, revision=revision)
    if isinstance(name, str) and _BARE.fullmatch(text) and not _FILE.fullmatch(text):
        return _from_default_hub(text, path, kind, revision)
    raise SourceError(
        f'{text!r}: there is no such file or folder here ({path.absolute()}), and it is no address. Give an existing path, org/name, '
        f'or scheme://...; known schemes: {_known()}.'
    )


def _from_default_hub(text: str, path: Path, kind: Kind, revision: str | None) -> Path:
    """`org/name` at the default hub. It may as well be a path with a slip in it, so an error tells where it was looked for."""
    given = os.environ.get('TWINKLE_DEFAULT_HUB')
    scheme = given or DEFAULT_HUB
    hub = f'TWINKLE_DEFAULT_HUB={given}' if given else f'{scheme}://'
    nowhere = (
        f'{text!r}: there is no such file or folder here ({path.absolute()}); as a name at the default hub ({hub}): '
    )
    try:
        return fetch(f'{scheme}://{text}', kind=kind, revision=revision)
    except MissingPackageError as error:
        raise type(error)(f'{nowhere}{error}') from error
    except SourceError as error:
        raise SourceError(f'{nowhere}{error}') from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a text that no file system takes as a name
        return False


def _known() -> str:
    from twinkle.registry import sources

    return ', '.join(f'{name}://' for name in sources.names())
