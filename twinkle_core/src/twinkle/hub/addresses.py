"""From an address, `scheme://rest@revision`, `org/name` or a path, to a local folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from twinkle.errors import MissingPartError, SourceError, UnknownNameError
from twinkle.hub.source import Kind

__all__ = ['cache_folder', 'fetch', 'resolve_dataset', 'resolve_model', 'split_address']

DEFAULT_HUB = 'hf'

_ADDRESS = re.compile(r'(?P<scheme>[A-Za-z][A-Za-z0-9_-]*)://(?P<rest>[^@]+)(@(?P<revision>.+))?')
_BARE = re.compile(r'[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*')


def cache_folder() -> Path:
    """Where converted and fetched files are kept: `TWINKLE_CACHE`, else the user's cache folder. It is created."""
    given = os.environ.get('TWINKLE_CACHE')
    default = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'twinkle'
    folder = Path(given).expanduser() if given else default
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
        raise SourceError(f'{address!r} has no scheme; write hf://org/name, say. Known schemes: {_known()}.')
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
    return Path(source.fetch(rest, kind=kind, revision=revision or at, allow_patterns=allow_patterns))


def resolve_model(model_id: str | Path, *, revision: str | None = None) -> str:
    """The local folder of a model: a path that exists, else what its scheme fetches, else `org/name` at the default hub.

    The default hub is Hugging Face (`hf`), or the scheme in `TWINKLE_DEFAULT_HUB`.

    Raises:
        SourceError: nothing there.
    """
    return str(_resolve(model_id, 'model', revision))


def resolve_dataset(dataset_id: str | Path, *, revision: str | None = None) -> str:
    """The local file or folder of a data set, found as `resolve_model` finds models."""
    return str(_resolve(dataset_id, 'dataset', revision))


def _resolve(name: str | Path, kind: Kind, revision: str | None) -> Path:
    text = str(name)
    path = Path(text).expanduser()
    if path.exists():
        return path
    if split_address(text) is not None:
        return fetch(text, kind=kind, revision=revision)
    if isinstance(name, str) and _BARE.fullmatch(text) and not path.suffix:
        return fetch(f'{os.environ.get("TWINKLE_DEFAULT_HUB", DEFAULT_HUB)}://{text}', kind=kind, revision=revision)
    raise SourceError(
        f'{text!r}: there is no such file or folder here ({path.absolute()}), and it is no address. Give an existing path, org/name, '
        f'or scheme://...; known schemes: {_known()}.'
    )


def _known() -> str:
    from twinkle.registry import sources

    return ', '.join(f'{name}://' for name in sources.names())
