"""Small checkpoints, and what is in an output folder."""

from __future__ import annotations

from pathlib import Path

from twinkle.checkpoint import commit_checkpoint


def write(output_dir, name, content='x', **options):
    """A small checkpoint."""
    with commit_checkpoint(output_dir, name, **options) as folder:
        (folder / 'sub').mkdir()
        (folder / 'sub' / 'weights.txt').write_text(content)
    return Path(output_dir) / name


def content(folder):
    return (folder / 'sub' / 'weights.txt').read_text()


def names(output_dir):
    """What is visible in an output folder."""
    return sorted(path.name for path in Path(output_dir).iterdir() if not path.name.startswith('.'))


def hidden(output_dir):
    """What saves have left, beside the lock."""
    return sorted(p.name for p in Path(output_dir).iterdir() if p.name.startswith('.') and p.name != '.twinkle.lock')
