"""Models: the protocol, its shared half, and whatever model classes the installed backends register.

`from twinkle.model import TransformersModel` finds the class through the registry `models`; without the package that brings it the
error is the `pip install` line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle.model.base import BaseModel
    from twinkle.model.protocol import TwinkleModel
    from twinkle.model.state import TrainState

__all__ = ['BaseModel', 'TrainState', 'TwinkleModel']

_OWN = {'BaseModel': 'base', 'TrainState': 'state', 'TwinkleModel': 'protocol'}


def __getattr__(name: str) -> Any:
    if name in _OWN:
        import importlib

        return getattr(importlib.import_module(f'{__name__}.{_OWN[name]}'), name)
    if name.startswith('_') or not name[0].isupper():  # not a class: leave import machinery and tools alone
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    from twinkle.errors import MissingPartError, UnknownNameError
    from twinkle.registry import models

    try:
        entry = models.find(name)
    except MissingPartError:
        raise  # an ImportError, which says what to install
    except UnknownNameError as error:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}. {error}') from None
    if name not in (entry.name, entry.class_name):  # an import is spelt as the class is
        raise AttributeError(
            f'module {__name__!r} has no attribute {name!r}. Did you mean {entry.class_name!r}? An import is spelt exactly so.'
        )
    return models.resolve(name)


def __dir__() -> list[str]:
    from twinkle.registry import models

    return sorted({*__all__, *(entry.class_name for entry in models.entries())})
