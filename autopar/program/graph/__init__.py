"""The captured graph as data, with what is known of it before anything is chosen.

Read `program.py` (the graph), `audit.py` (what capture made of the module), `frozen.py` (Python
values in the graph), `blocks.py` (which modules are blocks), `factors.py` (factors of its dims).
May import `rules`, `options`, `placement` and what lies below them. Mainly hands on `Program`.
"""

from autopar.program.graph.audit import Audit, Note
from autopar.program.graph.blocks import block_lists, block_of
from autopar.program.graph.factors import (
    Atom,
    Cell,
    Factors,
    Operator,
    Types,
    leaves,
    name_sizes,
    operators_of,
    tensor_types,
    unify,
)
from autopar.program.graph.frozen import AttributeReads, Frozen
from autopar.program.graph.program import (
    Accumulation,
    BufferInfo,
    Checkpointed,
    InputInfo,
    ParameterInfo,
    Program,
    Prologue,
    flatten_inputs,
    row_dims,
)

__all__ = [
    "Accumulation",
    "Atom",
    "AttributeReads",
    "Audit",
    "BufferInfo",
    "Cell",
    "Checkpointed",
    "Factors",
    "Frozen",
    "InputInfo",
    "Note",
    "Operator",
    "ParameterInfo",
    "Program",
    "Prologue",
    "Types",
    "block_lists",
    "block_of",
    "flatten_inputs",
    "leaves",
    "name_sizes",
    "operators_of",
    "row_dims",
    "tensor_types",
    "unify",
]
