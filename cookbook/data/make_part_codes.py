"""Write part_codes.jsonl: the part codes of a shop that does not exist, and what they mean.

    python cookbook/data/make_part_codes.py

A code is a kind, a material, a colour and a size, each by a made-up abbreviation. Every code is there once. The last rows are held out:
their codes are new, and made of abbreviations that other codes have.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

KINDS = {
    'VOK': 'bookshelf', 'TRI': 'kitchen chair', 'ZAM': 'desk lamp', 'GLU': 'garden bench', 'PEX': 'coat rack', 'HOB': 'wardrobe',
    'SNE': 'writing desk', 'DRU': 'picture frame', 'KIF': 'flower pot', 'MUL': 'wall clock', 'BAQ': 'toy box', 'WEN': 'bird house',
}  # fmt: skip
MATERIALS = {
    'ta': 'oak', 'or': 'steel', 'qi': 'bamboo', 'le': 'glass', 'um': 'clay', 'sy': 'copper', 'ja': 'wicker', 'fo': 'plastic',
}  # fmt: skip
COLOURS = {
    '17': 'red', '23': 'green', '38': 'blue', '44': 'black', '52': 'white', '69': 'yellow', '71': 'purple', '86': 'orange',
}  # fmt: skip
SIZES = {'r': 'small', 'n': 'medium', 'd': 'large', 'h': 'huge'}
QUESTIONS = ['{}', 'Is {} in stock?', 'What is part {}?', 'Two of {}, please.', 'Where do you keep {}?']
MEANINGS = [
    'A {size} {kind} made of {material}, painted {colour}.',
    'The {kind}: {material}, {colour}, {size}.',
    '{Colour} {kind} of {material} in {size}.',
    'In {size}: a {kind}. The material is {material} and the colour {colour}.',
]
ROWS, HELD_OUT, SEED = 480, 80, 0


def make_rows() -> list[dict[str, str]]:
    """Rows of `code`, `query`, `document` and `split`."""
    dice = random.Random(SEED)
    chosen = dice.sample(list(itertools.product(KINDS, MATERIALS, COLOURS, SIZES)), ROWS)
    rows = []
    for number, (kind, material, colour, size) in enumerate(chosen):
        code = f'{kind}-{material}{colour}{size}'
        words = {'kind': KINDS[kind], 'material': MATERIALS[material], 'colour': COLOURS[colour], 'size': SIZES[size]}
        meaning = dice.choice(MEANINGS).format(**words, Colour=COLOURS[colour].capitalize())
        split = 'train' if number < ROWS - HELD_OUT else 'held_out'
        rows.append({'code': code, 'query': dice.choice(QUESTIONS).format(code), 'document': meaning, 'split': split})
    return rows


if __name__ == '__main__':
    lines = [json.dumps(row) + '\n' for row in make_rows()]
    Path(__file__).with_name('part_codes.jsonl').write_text(''.join(lines))
