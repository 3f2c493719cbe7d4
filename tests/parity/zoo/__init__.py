"""Small models of many families with random weights, by name; the parity table trains them.

`entries.py` says what an entry is. `text.py` and `vision.py` hold unmodified models of
transformers, `plain.py` models of torch alone. `cells.py` holds the meshes and plans they run on.
"""

from tests.parity.zoo import plain, text, vision
from tests.parity.zoo.entries import Entry

FAMILIES: dict[str, Entry] = text.FAMILIES | vision.FAMILIES | plain.FAMILIES
