"""Every error that Twinkle raises, in one tree.

    TwinkleError
    ├── ConfigError (ValueError)              an option or argument has a value that cannot work
    │   ├── MeshError                         sizes that do not fit the world, or each other
    │   └── NameNotAllowedError               a name that would leave its folder, or that no file system takes
    ├── NotSupportedError (ValueError)        valid elsewhere; this backend, version or machine cannot do it
    ├── MissingPackageError (ImportError)     the way out is a `pip install` line
    ├── RegistryError
    │   ├── UnknownNameError (LookupError, ValueError)
    │   │   └── MissingPartError              ... that a package brings which is not installed; also a MissingPackageError
    │   ├── AmbiguousNameError (LookupError, ValueError)
    │   ├── AlreadyRegisteredError (ValueError)
    │   ├── PluginLoadError (ImportError)     a plugin that is installed and broken, or refused
    │   └── InvalidPartError (TypeError)      resolved, but not of the kind's base class or protocol
    ├── UntrustedCodeError (PermissionError)  code from a hub or a folder, without opting in
    ├── SourceError (OSError)                 a model, data set or file that cannot be found or fetched
    ├── DataError (ValueError)                a row, a file or a data set that cannot be used
    │   └── SampleTooLongError                a row longer than `max_length` under `truncation='raise'`
    ├── AdapterError
    │   ├── UnknownAdapterError (LookupError, ValueError)
    │   ├── DuplicateAdapterError (ValueError)
    │   └── SlotsFullError (RuntimeError)     no slot for a tenant, or none of its rank
    ├── StateError (RuntimeError)             a method called at the wrong moment
    ├── CheckpointError (RuntimeError)        a checkpoint that is missing, broken or does not fit
    └── RemoteError (RuntimeError)            a remote call that could not be dispatched or collected

Each error is also the standard exception that a reader would expect, so that `except ValueError` keeps working.
A message names the value, the rule that it breaks and the way out.
"""

from __future__ import annotations

__all__ = [
    'AdapterError',
    'AlreadyRegisteredError',
    'AmbiguousNameError',
    'CheckpointError',
    'ConfigError',
    'DataError',
    'DuplicateAdapterError',
    'InvalidPartError',
    'MeshError',
    'MissingPackageError',
    'MissingPartError',
    'NameNotAllowedError',
    'NotSupportedError',
    'PluginLoadError',
    'RegistryError',
    'RemoteError',
    'SampleTooLongError',
    'SlotsFullError',
    'SourceError',
    'StateError',
    'TwinkleError',
    'UnknownAdapterError',
    'UnknownNameError',
    'UntrustedCodeError',
]


class TwinkleError(Exception):
    """The base of every error that Twinkle raises on purpose."""

    # LookupError's family would print a quoted repr for KeyError; every message here is a sentence.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ''


class ConfigError(TwinkleError, ValueError):
    """An option or argument has a value that cannot work."""


class MeshError(ConfigError):
    """Mesh sizes that do not fit the world, each other, or the backend."""


class NameNotAllowedError(ConfigError):
    """A name that would leave its folder, or that cannot be a file or module name."""


class NotSupportedError(TwinkleError, ValueError):
    """A valid request that this backend, library version or machine cannot carry out."""


class MissingPackageError(TwinkleError, ImportError):
    """A package is needed and not installed; the message ends with the `pip install` line."""


class RegistryError(TwinkleError):
    """The base of what goes wrong between a name and a part."""


class UnknownNameError(RegistryError, LookupError, ValueError):
    """No part of this kind has the name."""


class MissingPartError(UnknownNameError, MissingPackageError):
    """The name is known to live in a package that is not installed; the message ends with the `pip install` line."""


class AmbiguousNameError(RegistryError, LookupError, ValueError):
    """Several distributions claim the name."""


class AlreadyRegisteredError(RegistryError, ValueError):
    """A runtime registration would shadow an existing name."""


class PluginLoadError(RegistryError, ImportError):
    """A part's module or attribute could not be loaded, or its distribution's needs are unmet."""


class InvalidPartError(RegistryError, TypeError):
    """What was resolved or registered is not of the kind's base class or protocol."""


class UntrustedCodeError(TwinkleError, PermissionError):
    """Code from a hub or a folder was asked for without opting in."""


class SourceError(TwinkleError, OSError):
    """A model, data set or file cannot be found or fetched."""


class DataError(TwinkleError, ValueError):
    """A row, a file or a data set that cannot be used."""


class SampleTooLongError(DataError):
    """A row is longer than `max_length` and `truncation='raise'`."""


class AdapterError(TwinkleError):
    """The base of adapter errors."""


class UnknownAdapterError(AdapterError, LookupError, ValueError):
    """No adapter has the name, or it was left out and several exist."""


class DuplicateAdapterError(AdapterError, ValueError):
    """An adapter of that name exists already."""


class SlotsFullError(AdapterError, RuntimeError):
    """No slot is free for a tenant, or none is large enough; the message says who holds what."""


class StateError(TwinkleError, RuntimeError):
    """A method was called at a moment when it has no meaning."""


class CheckpointError(TwinkleError, RuntimeError):
    """A checkpoint is missing, broken, or does not fit the model."""


class RemoteError(TwinkleError, RuntimeError):
    """A remote call could not be dispatched, run or collected."""
