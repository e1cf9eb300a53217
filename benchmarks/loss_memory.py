"""Cross entropy and log-probabilities of a large vocabulary: peak memory and time against full logits.

Vocabulary 151,936, hidden 512, 2,048 tokens, fp32, one thread, forward and backward. Each side runs in a fresh process; its peak is
the highest resident memory above what it held before the first run, without the head weight's own gradient, which both sides need.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

from benchmarks.report import Report, run_module

VOCABULARY, HIDDEN, TOKENS = 151_936, 512, 2_048
KINDS = {'cross entropy': ('naive_nll', 'nll', 1.2), 'log-probabilities': ('naive_logps', 'logps', 1.6)}


def main() -> int:
    """Compare, for a trainable and for a frozen head."""
    report = Report(
        'loss_memory', f'V {VOCABULARY:,}, H {HIDDEN}, {TOKENS:,} tokens; ours against full logits in PyTorch'
    )
    for frozen in (False, True):
        head = 'frozen head' if frozen else 'trainable head'
        for name, (naive, ours, bound) in KINDS.items():
            options = ['--frozen'] if frozen else []
            # In turn, twice each, so that what else the machine does hits both alike.
            sides = [run_module('benchmarks.loss_memory', kind, *options) for kind in (naive, ours, naive, ours)]
            theirs, mine = sides[0::2], sides[1::2]
            case = f'{name}, {head}'
            peak = [max(side['peak_mb'] for side in pair) for pair in (theirs, mine)]
            report.figure(case, 'peak memory, full logits', peak[0], 'MB')
            report.figure(case, 'peak memory', peak[1], 'MB', peak[0] / 8)
            times = [statistics.median(side['cpu_s'] for side in pair) for pair in (theirs, mine)]
            report.figure(case, 'time over full logits', times[1] / times[0], 'ratio', bound)
            for key, scale in (('loss', 'loss'), ('gradient norm', 'gradient norm'), ('projection', 'gradient norm')):
                difference = abs(theirs[0][key] - mine[0][key]) / abs(theirs[0][scale])
                report.figure(case, f'{key}, relative difference', difference, '', 1e-5)
    return report.end()


def _resident_mb(field: str) -> float:
    line = next(line for line in Path('/proc/self/status').read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def _side(kind: str, frozen: bool) -> dict[str, float]:
    """One side, in this process."""
    import torch

    from twinkle.loss.linear import linear_cross_entropy, linear_logps

    torch.set_num_threads(1)  # threads that wait for each other, on a busy machine above all, would count as work
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = (torch.randn(VOCABULARY, HIDDEN) * 0.02).requires_grad_(not frozen)
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    by_token = torch.rand(TOKENS)

    def run() -> torch.Tensor:
        hidden.grad = weight.grad = None
        if kind == 'naive_nll':
            loss = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction='sum')
        elif kind == 'nll':
            loss, _ = linear_cross_entropy(hidden, weight, labels)
        elif kind == 'naive_logps':
            log_p = (hidden @ weight.t()).log_softmax(-1)
            loss = -(log_p.gather(1, labels.unsqueeze(1)).squeeze(1) * by_token).sum()
        else:
            logps, _ = linear_logps(hidden, weight, labels)
            loss = -(logps * by_token).sum()
        loss.backward()
        return loss.detach()

    Path('/proc/self/clear_refs').write_text('5')  # the peak begins here
    before = _resident_mb('VmHWM')
    times = []
    for _ in range(2):  # the first warms up
        start = time.process_time()
        loss = run()
        times.append(time.process_time() - start)
    own = 0.0 if frozen else VOCABULARY * HIDDEN * 4 / 2**20
    peak = _resident_mb('VmHWM') - before - own  # before anything else is computed from what is left
    wanted = [p.grad.double() for p in (hidden, weight) if p.grad is not None]
    norm = math.sqrt(sum(float(g.square().sum()) for g in wanted))
    # One number along a random direction tells gradients apart that have the same norm.
    projection = sum(float((g * torch.randn_like(g)).sum()) for g in wanted)
    figures = {'peak_mb': peak, 'cpu_s': min(times), 'loss': float(loss)}
    return {**figures, 'gradient norm': norm, 'projection': projection}


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        'kind', nargs='?', choices=[kind for pair in KINDS.values() for kind in pair[:2]], help='one side only'
    )
    parser.add_argument('--frozen', action='store_true', help='the head is not trained')
    options = parser.parse_args()
    if options.kind is None:
        raise SystemExit(main())
    print(json.dumps(_side(options.kind, options.frozen)))
