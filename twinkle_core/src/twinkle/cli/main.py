"""The commands and their arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from twinkle import __version__
from twinkle.errors import TwinkleError

__all__ = ['main']


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 well, 1 something is wrong, 2 called wrongly."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser(given)
    options = parser.parse_args(given)
    run = getattr(options, 'run', None)
    if run is None:
        parser.print_help()
        return 2
    try:
        return int(run(options) or 0)
    except TwinkleError as error:
        print(f'twinkle: {error}', file=sys.stderr)
        return 1
    except BrokenPipeError:  # `twinkle plugins list | head`
        sys.stderr.close()
        return 0


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    from twinkle.cli import plugins

    parser = argparse.ArgumentParser(
        prog='twinkle', description='Twinkle: train large models through one small protocol.'
    )
    parser.add_argument('--version', action='version', version=f'twinkle-core {__version__}')
    commands = parser.add_subparsers(title='commands', metavar='COMMAND')
    plugins.add_commands(commands)
    if not given or given[0] not in commands.choices:  # a plugin that hangs must not keep us from looking for it
        from twinkle.plugins import call_hook

        call_hook('add_cli_commands', commands=commands)
    return parser
