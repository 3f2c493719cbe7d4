"""A plan as a graph: nodes of modules, edges with reshards, equal blocks folded; as Graphviz text.

Read `kinds.py` (how a result is sharded, as a colour), `nodes.py` (lines grouped into few nodes),
`folding.py` (equal blocks, drawn once); then what Graphviz draws: `boxes.py`, `stage_graph.py` and
`graph_text.py`. May import the files of `report`. Mainly hands on `picture`, `fold` and `dot`.
"""

from autopar.report.picture.boxes import FRAME, escaped, traffic
from autopar.report.picture.folding import fold, is_collective
from autopar.report.picture.graph_text import dot
from autopar.report.picture.kinds import (
    ParameterUsed,
    parameter_variables,
    shard_kinds,
)
from autopar.report.picture.nodes import (
    VIEWS,
    PictureEdge,
    PictureNode,
    kind_of,
    operator_name,
    picture,
)

__all__ = [
    "FRAME",
    "VIEWS",
    "ParameterUsed",
    "PictureEdge",
    "PictureNode",
    "dot",
    "escaped",
    "fold",
    "is_collective",
    "kind_of",
    "operator_name",
    "parameter_variables",
    "picture",
    "shard_kinds",
    "traffic",
]
