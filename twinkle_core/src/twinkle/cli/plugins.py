"""`twinkle plugins list | show | doctor | new`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from twinkle.parts import PartEntry, fold

__all__ = ['add_commands', 'describe_entries']

_DOCTOR_HELP = 'load everything in a process of its own; exits 1 if something is broken or in conflict'


def add_commands(commands: Any) -> None:
    """Add `plugins` and its sub-commands."""
    parser = commands.add_parser(
        'plugins',
        help='what is installed, from where, and what is broken',
        epilog='Examples: twinkle plugins list losses; twinkle plugins show optimizers:adamw; twinkle plugins doctor --json; twinkle '
        'plugins new my-losses',
    )
    sub = parser.add_subparsers(title='commands', metavar='COMMAND', required=True)

    listing = sub.add_parser('list', help='every part by kind and name; nothing is imported')
    listing.add_argument('kind', nargs='?', help='losses, optimizers, models, ... (default: all)')
    listing.set_defaults(run=_list)

    show = sub.add_parser('show', help='one part in full: where it comes from, what it says about itself')
    show.add_argument('name', help='a name, or kind:name, or name@distribution')
    show.set_defaults(run=_show)

    doctor = sub.add_parser('doctor', help=_DOCTOR_HELP)
    also = commands.add_parser('doctor', help='the same as `twinkle plugins doctor`')

    new = sub.add_parser('new', help='write a package with a loss, a patch and tests, ready to install')
    new.add_argument('name', help='the distribution, such as my-losses')
    new.add_argument('--folder', default='.', help='where to put it (default: here)')
    new.set_defaults(run=_new)
    for command in (doctor, also):
        command.add_argument(
            '--timeout', type=float, default=120.0, help='seconds that one part may take (default: %(default)s)'
        )
        command.set_defaults(run=_doctor)
    for command in (listing, show, doctor, also, new):
        command.add_argument('--json', action='store_true', help='for programs; the schema is in the documentation')


def describe_entries(entries: Sequence[PartEntry]) -> list[dict[str, Any]]:
    """Entries as plain data, as `plugins.schema.json` describes them."""
    return [
        {
            'kind': entry.kind,
            'name': entry.name,
            'target': entry.target,
            'distribution': entry.distribution,
            'version': entry.version,
            'source': entry.source,
            'state': entry.state,
            'reason': entry.reason,
        }
        for entry in entries
    ]


class _HookEntries:
    """The hooks that are installed, listed like a registry's parts."""

    kind = 'hooks'

    def entries(self) -> list[PartEntry]:
        from twinkle.plugins import HOOKS, plugin_cache

        return [PartEntry.of_plugin(self.kind, found) for found in plugin_cache.parts(HOOKS)]


def _kinds(kind: str | None) -> list[Any]:
    from twinkle.errors import UnknownNameError
    from twinkle.registry import registries

    if kind is None:
        return list(registries.values())
    for name, registry in registries.items():
        if fold(name).rstrip('s') == fold(kind).rstrip('s'):
            return [registry]
    raise UnknownNameError(f'Unknown kind {kind!r}. There are: {", ".join(sorted(registries))}.')


def _list(options: argparse.Namespace) -> int:
    hooks = _HookEntries()
    if options.kind is not None and fold(options.kind).rstrip('s') == 'hook':
        kinds = [hooks]
    else:
        kinds = [*_kinds(options.kind), *([hooks] if options.kind is None else [])]
    entries = [entry for registry in kinds for entry in registry.entries()]
    if options.json:
        print(json.dumps({'format': 1, 'parts': describe_entries(entries)}, indent=2))
        return 0
    rows = [(e.kind, e.name, e.target, f'{e.distribution} {e.version}'.strip(), _note(e)) for e in entries]
    _table(['kind', 'name', 'target', 'from', ''], rows, blank_repeats=True)
    return 0


def _note(entry: PartEntry) -> str:
    if entry.state in ('unloaded', 'loaded'):
        return ''
    return f'{entry.state}: {entry.reason}' if entry.reason else entry.state


def _table(header: list[str], rows: Sequence[Sequence[str]], *, blank_repeats: bool = False) -> None:
    """Aligned columns; a first column that repeats is written once."""
    widths = [max([len(header[i]), *(len(row[i]) for row in rows)]) for i in range(len(header))]
    previous = None
    for row in [header, *rows]:
        cells = list(row)
        if blank_repeats and cells[0] == previous:
            cells[0] = ''
        else:
            previous = cells[0]
        print('  '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def _show(options: argparse.Namespace) -> int:
    import inspect

    from twinkle.errors import AmbiguousNameError, TwinkleError, UnknownNameError

    kind, _, name = options.name.rpartition(':')
    found, close = [], []
    for registry in _kinds(kind or None):
        try:
            found.append((registry, registry.find(name)))
        except AmbiguousNameError as error:
            print(error)
            return 1
        except TwinkleError as error:
            close.append(str(error))
    if not found:
        hints = [text for text in close if 'Did you mean' in text or 'pip install' in text]
        raise UnknownNameError(hints[0] if hints else f'No kind has a part named {name!r}. See `twinkle plugins list`.')
    shown = []
    for registry, entry in found:
        problem, text, signature = '', '', ''
        try:
            part = registry.check(entry.load())
            text = inspect.getdoc(part) or ''
            if isinstance(part, type):
                signature = str(inspect.signature(part))
        except (TwinkleError, ValueError) as error:
            problem = str(error)
        shown.append({**describe_entries([entry])[0], 'signature': signature, 'doc': text, 'problem': problem})
    if options.json:
        print(json.dumps({'format': 1, 'parts': shown}, indent=2))
    else:
        print('\n\n'.join(_described(item) for item in shown))
    return int(any(item['problem'] for item in shown))


def _described(item: dict[str, str]) -> str:
    lines = [
        f'{key:<13} {item[key]}' for key in ('kind', 'name', 'target', 'distribution', 'version', 'source', 'state')
    ]
    lines += [f'{key:<13} {item[key]}' for key in ('signature', 'problem') if item[key]]
    return '\n'.join(lines) + (f'\n\n{item["doc"]}' if item['doc'] else '')


def _doctor(options: argparse.Namespace) -> int:
    from twinkle.cli.doctor import examine

    report = examine(options.timeout)
    problems = [*report['failures'], *report['conflicts'], *report['warnings']]
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        rows = [
            (d['distribution'], d['version'], str(d['parts']), f'{d["seconds"]:.2f} s') for d in report['distributions']
        ]
        _table(['distribution', 'version', 'parts', 'loading'], rows)
        for title, key in (('Failures', 'failures'), ('Conflicts', 'conflicts'), ('Warnings', 'warnings')):
            for number, item in enumerate(report[key]):
                print(f'\n{title}:' if number == 0 else '')
                where = ': '.join(word for word in (item['kind'], item['name']) if word)
                print(f'  {where}\n    {item["problem"]}' if where else f'  {item["problem"]}')
        print(f'\n{"Nothing is wrong." if not problems else f"{len(problems)} problem(s)."}')
    return int(bool(report['failures'] or report['conflicts']))


def _new(options: argparse.Namespace) -> int:
    from pathlib import Path

    from twinkle.cli.scaffold import write_package

    folder, files = write_package(options.name, Path(options.folder))
    if options.json:
        print(json.dumps({'format': 1, 'folder': str(folder), 'files': files}, indent=2))
        return 0
    print(f'{folder}:')
    for file in files:
        print(f'  {file}')
    print(f'\nNext:\n  pip install -e {folder}\n  pytest {folder}\n  twinkle plugins list losses', file=sys.stdout)
    return 0
