"""The Hugging Face and ModelScope hubs as sources."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twinkle.errors import MissingPackageError, SourceError
from twinkle.hub.source import Kind, Source

__all__ = ['HuggingFaceSource', 'ModelScopeSource', 'is_offline']

_REPOSITORY = re.compile(r'[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?', re.ASCII)
_REVISION = re.compile(r'[\w.+-][\w.+/-]*', re.ASCII)

# Weights that are never loaded here: pickles, and copies in formats of other programs, often as large again as the safetensors.
_NOT_LOADED = ['*.bin', '*.ckpt', '*.gguf', '*.h5', '*.msgpack', '*.onnx', '*.pt', '*.pth', 'original/*']


def is_offline() -> bool:
    """Whether hubs must not be asked (`HF_HUB_OFFLINE`)."""
    return os.environ.get('HF_HUB_OFFLINE', '').lower() in ('1', 'true', 'yes', 'on')


class HuggingFaceSource(Source):
    """`hf://org/name`, through `huggingface_hub` and its cache. `HF_HUB_OFFLINE` is honoured: nothing is asked of the network.

    Of a model, what Twinkle does not load (pickled weights, GGUF, ONNX, ...) is left out unless `allow_patterns` are given.
    """

    def fetch(
        self, rest: str, *, kind: Kind = 'model', revision: str | None = None, allow_patterns: list[str] | None = None
    ) -> Path:
        repository = _checked('hf', rest, revision)
        hub = _require('huggingface_hub', 'hf')
        return _downloaded(
            'hf',
            repository,
            revision,
            lambda: hub.snapshot_download(
                repository,
                repo_type=kind,
                revision=revision,
                allow_patterns=allow_patterns,
                ignore_patterns=_left_out(kind, allow_patterns),
                local_files_only=is_offline(),
            ),
        )


class ModelScopeSource(Source):
    """`ms://org/name`, through `modelscope` and its cache. `HF_HUB_OFFLINE` is honoured here, too."""

    def fetch(
        self, rest: str, *, kind: Kind = 'model', revision: str | None = None, allow_patterns: list[str] | None = None
    ) -> Path:
        repository = _checked('ms', rest, revision)
        hub = _require('modelscope', 'ms')
        download = hub.snapshot_download if kind == 'model' else hub.dataset_snapshot_download
        options: dict[str, Any] = {'local_files_only': True} if is_offline() else {}
        if options and 'local_files_only' not in inspect.signature(download).parameters:
            # From modelscope 1.38 on only the function for models can be kept off the network; it takes data sets, too.
            download, options = hub.snapshot_download, {**options, 'repo_type': kind}
        patterns = {'allow_patterns': allow_patterns, 'ignore_patterns': _left_out(kind, allow_patterns)}
        return _downloaded(
            'ms', repository, revision, lambda: download(repository, revision=revision, **patterns, **options)
        )


def _checked(scheme: str, rest: str, revision: str | None) -> str:
    """`rest` if it is `org/name`; names and revisions become folders of the hub's own cache, and must not leave it."""
    if not _REPOSITORY.fullmatch(rest) or '..' in rest:
        raise SourceError(
            f'{scheme}://{rest}: not a repository; write {scheme}://org/name, with @revision behind it if you like.'
        )
    if revision is not None and (not _REVISION.fullmatch(revision) or '..' in revision):
        raise SourceError(f'{scheme}://{rest}: {revision!r} is no revision; give a branch, a tag or a commit.')
    return rest


def _require(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        broken = '' if isinstance(error, ModuleNotFoundError) and error.name == module else f' ({error})'
        raise MissingPackageError(f"{extra}:// needs {module}{broken}: pip install 'twinkle-core[{extra}]'") from error


def _left_out(kind: Kind, allow_patterns: list[str] | None) -> list[str] | None:
    return _NOT_LOADED if kind == 'model' and allow_patterns is None else None


def _downloaded(scheme: str, repository: str, revision: str | None, download: Callable[[], Any]) -> Path:
    """What `download` brings. Hubs have dozens of errors, from HTTP to file locks; here they are one, with the cause chained."""
    try:
        return Path(download())
    except Exception as error:
        address = f'{scheme}://{repository}{f"@{revision}" if revision else ""}'
        reason = str(error).strip().rstrip('.') or type(error).__name__
        if is_offline():
            raise SourceError(
                f'{address} is not in the local cache, and HF_HUB_OFFLINE is set, so the hub was not asked: {reason}. '
                'Unset it to fetch this once, or pass a local folder.'
            ) from error
        raise SourceError(
            f'{address} cannot be fetched: {reason}. Check the name and the revision, your network, and your access if it is '
            'gated; or pass a local folder.'
        ) from error
