"""The base of sources: who turns `scheme://rest` into a local folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Literal

__all__ = ['Kind', 'Source']

Kind = Literal['model', 'dataset']


class Source(ABC):
    """One scheme. Registered in `sources` under the scheme's name, so that a package can bring its own.

    Attributes:
        kinds: what it can fetch.
    """

    kinds: ClassVar[tuple[Kind, ...]] = ('model', 'dataset')

    @abstractmethod
    def fetch(
        self, rest: str, *, kind: Kind = 'model', revision: str | None = None, allow_patterns: list[str] | None = None
    ) -> Path:
        """A local folder (or file) with what `rest` (the address without its scheme) names. Runs no code from there.

        Args:
            revision: a branch, tag or commit.
            allow_patterns: fetch only files that match.

        Raises:
            SourceError: it cannot be found or fetched.
            MissingPackageError: the library that fetches is not installed.
        """
