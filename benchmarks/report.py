"""What all benchmarks share: a line per figure, paired runs, peak memory of a fresh process."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

__all__ = ['Report', 'median_ratio', 'paired', 'run_module']


class Report:
    """Collects figures of one benchmark and prints each as a JSON line."""

    def __init__(self, benchmark: str, what: str) -> None:
        self.benchmark = benchmark
        self.failed: list[str] = []
        print(f'== {benchmark}: {what}', flush=True)

    def figure(
        self, case: str, metric: str, value: float, unit: str, bound: float | None = None, *, at_least: bool = False
    ) -> None:
        """One figure. It holds if it is at most the bound (at least, with `at_least`); without a bound it always does."""
        holds = bound is None or (value >= bound if at_least else value <= bound)
        if not holds:
            self.failed.append(f'{case} {metric}')
        line = {'benchmark': self.benchmark, 'case': case, 'metric': metric, 'value': round(value, 6), 'unit': unit}
        print(json.dumps({**line, 'bound': bound, 'holds': holds}), flush=True)

    def end(self) -> int:
        """Exit status: 1 if a bound does not hold."""
        if self.failed:
            print(f'== {self.benchmark}: NOT held: {"; ".join(self.failed)}', flush=True)
        return int(bool(self.failed))


def paired(
    a: Callable[[], object], b: Callable[[], object], pairs: int, *, warm_up: int = 2
) -> tuple[list[float], list[float]]:
    """CPU seconds of `a` and `b`, run in turn (ABAB), so that what else the machine does hits both alike."""
    for _ in range(warm_up):
        a()
        b()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs):
        for side, function in enumerate((a, b)):
            start = time.process_time()
            function()
            times[side].append(time.process_time() - start)
    return times


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """The median of `b` over `a`, pair by pair."""
    return statistics.median(y / x for x, y in zip(a, b, strict=True))


def run_module(module: str, *arguments: str) -> dict[str, float]:
    """Run a module in a fresh process (for its peak memory) and read the JSON on its last line."""
    done = subprocess.run([sys.executable, '-m', module, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f'{module} {" ".join(arguments)} failed:\n{done.stderr[-3000:]}')
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures
