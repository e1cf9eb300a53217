"""The tree of errors: one base, a standard exception beside it, a sentence for a message."""

from __future__ import annotations

import pickle
import re

import pytest

from twinkle import errors
from twinkle.errors import TwinkleError

CLASSES = [getattr(errors, name) for name in errors.__all__]


def test_all_lists_every_error_once_and_sorted():
    """`__all__` is the tree, no more and no less."""
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert errors.__all__ == sorted(defined)


@pytest.mark.parametrize('error', CLASSES)
def test_every_error_is_a_twinkle_error_with_a_docstring(error):
    """`except TwinkleError` catches all, and each says what it is for."""
    assert issubclass(error, TwinkleError)
    assert error.__doc__


STANDARD = (ValueError, LookupError, ImportError, TypeError, PermissionError, OSError, RuntimeError)
BASES = {'TwinkleError', 'RegistryError', 'AdapterError'}


@pytest.mark.parametrize('error', [error for error in CLASSES if error.__name__ not in BASES])
def test_what_is_raised_is_also_a_standard_exception(error):
    """A reader's `except ValueError` keeps working."""
    assert issubclass(error, STANDARD)


@pytest.mark.parametrize('error', CLASSES)
def test_a_message_is_shown_as_it_was_written(error):
    """No quotes around it (as KeyError has), the same after a journey between processes."""
    raised = error("name 'x' breaks the rule. Do y.")
    assert str(raised) == "name 'x' breaks the rule. Do y."
    again = pickle.loads(pickle.dumps(raised))
    assert (type(again), str(again)) == (error, str(raised))
    assert str(error()) == ''


def test_the_drawn_tree_is_the_real_one():
    """The tree at the top of the module names every class under its base, with its standard exceptions."""
    drawn, stack = {}, []
    for line in errors.__doc__.splitlines():
        match = re.match(r'\s{4}((?:[│├└─ ]{4})*)(\w+Error)(?: \(([\w, ]+)\))?', line)
        if match:
            depth = len(match[1]) // 4
            stack[depth:] = [match[2]]
            drawn[match[2]] = (stack[depth - 1] if depth else None, match[3])
    assert set(drawn) == set(errors.__all__)
    for name, (base, standard) in drawn.items():
        assert base is None or issubclass(getattr(errors, name), getattr(errors, base))
        for other in (standard or '').split(', '):
            assert not other or issubclass(getattr(errors, name), getattr(__import__('builtins'), other))


def test_a_missing_part_is_both_an_unknown_name_and_a_missing_package():
    """Whoever expects either finds it."""
    assert issubclass(errors.MissingPartError, (errors.UnknownNameError, errors.MissingPackageError))
    assert issubclass(errors.MissingPartError, LookupError)
    assert issubclass(errors.MissingPartError, ImportError)
