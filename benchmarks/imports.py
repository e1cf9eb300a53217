"""What `import twinkle`, discovery and looking up a name cost."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path

from benchmarks.report import Report

DISTRIBUTIONS = 1000


def main() -> int:
    """Measure and report."""
    report = Report(
        'imports', 'import twinkle over bare Python; discovery of 1,000 made-up distributions; a cached resolve'
    )
    code = 'import time, sys; {}; print(time.process_time(), "torch" in sys.modules)'
    times: dict[str, list[float]] = {'pass': [], 'import twinkle': []}
    for _ in range(11):
        for statement, seen in times.items():
            cpu, loaded = subprocess.run(
                [sys.executable, '-c', code.format(statement)], capture_output=True, text=True, check=True
            ).stdout.split()
            seen.append(float(cpu))
            assert loaded == 'False', 'import twinkle loads torch'
    added = statistics.median(b - a for a, b in zip(times['pass'], times['import twinkle'], strict=True))
    report.figure('import twinkle', 'CPU over bare Python', 1e3 * added, 'ms', 100)

    with tempfile.TemporaryDirectory() as folder:
        _make_distributions(Path(folder))
        script = (
            f'import sys, time; sys.path.append({folder!r}); import twinkle.registry; s = time.process_time(); '
            'n = len(twinkle.registry.losses.names()); '
            'import json; print(json.dumps([time.process_time() - s, n]))'
        )
        done = [
            subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, check=True) for _ in range(5)
        ]
        seconds, count = zip(*(json.loads(run.stdout) for run in done), strict=True)
        assert min(count) >= DISTRIBUTIONS
        report.figure(f'{DISTRIBUTIONS} distributions', 'discovery, CPU', statistics.median(seconds), 's', 0.5)

    from twinkle.registry import losses

    losses.resolve('cross_entropy')
    best = min(timeit.repeat(lambda: losses.resolve('cross_entropy'), number=10_000, repeat=7)) / 10_000
    report.figure('losses.resolve', 'cached', 1e6 * best, 'microseconds', 5)
    return report.end()


def _make_distributions(folder: Path) -> None:
    for number in range(DISTRIBUTIONS):
        info = folder / f'made_up_{number}-1.0.dist-info'
        info.mkdir()
        (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: made-up-{number}\nVersion: 1.0\n')
        (info / 'entry_points.txt').write_text(f'[twinkle.losses]\nmade_up_{number} = made_up_{number}:Loss\n')


if __name__ == '__main__':
    argparse.ArgumentParser(description=__doc__).parse_args()
    raise SystemExit(main())
