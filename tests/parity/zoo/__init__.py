"""Small models of many families with random weights, by name: what the parity table trains.

`text` and `vision` hold models of transformers made from their configurations, unmodified;
`plain` models of torch alone. `cells` says on which meshes and by which plans they run.
"""

from tests.parity.zoo import plain, text, vision
from tests.parity.zoo.entries import Entry

FAMILIES: dict[str, Entry] = text.FAMILIES | vision.FAMILIES | plain.FAMILIES
