"""The Hugging Face and ModelScope hubs as sources."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

from twinkle.errors import MissingPackageError, SourceError
from twinkle.hub.source import Kind, Source

__all__ = ['HuggingFaceSource', 'ModelScopeSource', 'is_offline']

_REPOSITORY = re.compile(r'[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?')


def is_offline() -> bool:
    """Whether hubs must not be asked (`HF_HUB_OFFLINE`)."""
    return os.environ.get('HF_HUB_OFFLINE', '').lower() in ('1', 'true', 'yes', 'on')


def _repository(scheme: str, rest: str) -> str:
    """`rest` if it is `org/name`; hub names stay within their own cache."""
    if not _REPOSITORY.fullmatch(rest) or '..' in rest:
        raise SourceError(
            f'{scheme}://{rest}: not a repository; write {scheme}://org/name, with @revision behind it if you like.'
        )
    return rest


def _require(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(f'{extra}:// needs {module}: pip install twinkle-core[{extra}]') from error


class HuggingFaceSource(Source):
    """`hf://org/name`, through `huggingface_hub` and its cache. `HF_HUB_OFFLINE` is honoured: nothing is asked of the network."""

    def fetch(
        self, rest: str, *, kind: Kind = 'model', revision: str | None = None, allow_patterns: list[str] | None = None
    ) -> Path:
        hub = _require('huggingface_hub', 'hf')
        repository = _repository('hf', rest)
        try:
            folder = hub.snapshot_download(
                repository,
                repo_type=kind,
                revision=revision,
                allow_patterns=allow_patterns,
                local_files_only=is_offline(),
            )
        except Exception as error:
            offline = ' (HF_HUB_OFFLINE is set, so only the local cache was looked at)' if is_offline() else ''
            raise SourceError(
                f'hf://{repository}{f"@{revision}" if revision else ""} cannot be fetched{offline}: {error} Check the name and the '
                'revision, your network, and your access if it is gated; or pass a local folder.'
            ) from error
        return Path(folder)


class ModelScopeSource(Source):
    """`ms://org/name`, through `modelscope` and its cache."""

    def fetch(
        self, rest: str, *, kind: Kind = 'model', revision: str | None = None, allow_patterns: list[str] | None = None
    ) -> Path:
        hub = _require('modelscope', 'ms')
        repository = _repository('ms', rest)
        download = hub.snapshot_download if kind == 'model' else hub.dataset_snapshot_download
        options: dict[str, Any] = {'local_files_only': True} if is_offline() else {}
        try:
            folder = download(repository, revision=revision, allow_file_pattern=allow_patterns, **options)
        except Exception as error:
            raise SourceError(
                f'ms://{repository}{f"@{revision}" if revision else ""} cannot be fetched: {error} Check the name and the revision, '
                'and your network; or pass a local folder.'
            ) from error
        return Path(folder)
