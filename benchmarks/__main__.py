"""`python -m benchmarks [NAME ...]`: all benchmarks, or those that are named. Exits 1 if a bound does not hold."""

from __future__ import annotations

import argparse
import importlib

NAMES = ('checkpoint', 'distributed', 'imports', 'loss_memory', 'multi_lora', 'overhead', 'packing')


def main() -> int:
    """Run them one after the other."""
    parser = argparse.ArgumentParser(prog='nox -s bench --', description=__doc__)
    parser.add_argument('names', nargs='*', metavar='NAME', help=f'of {", ".join(NAMES)}; all without any')
    names = parser.parse_args().names
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        parser.error(f'unknown benchmark {", ".join(unknown)}; there are {", ".join(NAMES)}')
    return max([importlib.import_module(f'benchmarks.{name}').main() for name in names or NAMES])


if __name__ == '__main__':
    raise SystemExit(main())
