"""A conformance kit for whoever writes a backend, and a toy backend to learn from.

    pytest --pyargs twinkle.testing.conformance --twinkle-model my_pkg:MyModel
    pytest --pyargs twinkle.testing.conformance --twinkle-model my_pkg:MyModel --twinkle-ranks 2

The rules are the protocol of `twinkle.model.TwinkleModel` as tests: shapes, states, numbers, errors, and with several ranks what
must hold among them. They know a backend by its public methods only. `twinkle.testing.subject` says how the kit makes a model,
and which hooks a backend may offer for that.

A backend that cannot do something says so in its class attribute `cannot`, method by method with the reason
(`cannot = {'forward': 'a pipeline runs forward and backward as one'}`). The kit then leaves out the rules that need the method, and
holds the backend to its word instead: the call must raise `NotSupportedError` with that reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle.testing.subject import Subject
    from twinkle.testing.toy import ToyModel

__all__ = ['Subject', 'ToyModel']


def __getattr__(name: str) -> Any:
    if name == 'Subject':
        from twinkle.testing.subject import Subject

        return Subject
    if name == 'ToyModel':
        from twinkle.testing.toy import ToyModel

        return ToyModel
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
