"""What is known of a program before any mesh: types, batch, planning nodes, repeated blocks.

Reading order: `groups.py` (planning nodes), `microbatch.py` (the batch), `gathering.py` (what
parameters cost), `kernels.py` (which operators a compiler fuses), `analysis.py` (these facts in one
object), `folding.py` (repeated blocks), `equal_parts.py` (equal stages), `cutting.py` (stages and
what crosses between them), `recompute.py` (what may be recomputed), `padding.py` (vocabularies),
`fallback.py` (operators without a rule), `documents.py` (packed into rows), `matmul_values.py`
(values at matmuls), `arguments.py` (arguments of calls in generated programs).
May import the solvers and everything below `passes`, but not `passes/reshard`.
Mainly hands on `Analysis`, `cut` and `fold`.
"""

from autopar.passes.analysis.analysis import Analysis, Neediest, compute_dtype, stored_dtype
from autopar.passes.analysis.arguments import override, prologue_lines
from autopar.passes.analysis.cutting import Side, boundary_specs, cut, is_boundary_spec
from autopar.passes.analysis.documents import check_lengths
from autopar.passes.analysis.equal_parts import Numbered, rename_lowered, rename_strategy
from autopar.passes.analysis.fallback import accept_missing, keep_whole_as_planned
from autopar.passes.analysis.folding import KEPT, Folded, Run, find_runs, fold, place_in
from autopar.passes.analysis.gathering import Gathering
from autopar.passes.analysis.groups import JointStrategy, OperatorGroup, PlacedOperator
from autopar.passes.analysis.kernels import FusedTraffic
from autopar.passes.analysis.matmul_values import values_at_matmuls
from autopar.passes.analysis.microbatch import batch_of
from autopar.passes.analysis.padding import Paddings, find_paddings, pad, pad_for_ranks
from autopar.passes.analysis.recompute import (
    MODES,
    SEARCHED,
    Recomputable,
    aligned_runs,
    blocks,
    is_searched,
    recomputed_operators,
)

__all__ = [
    "KEPT",
    "MODES",
    "SEARCHED",
    "Analysis",
    "Folded",
    "FusedTraffic",
    "Gathering",
    "JointStrategy",
    "Neediest",
    "Numbered",
    "OperatorGroup",
    "Paddings",
    "PlacedOperator",
    "Recomputable",
    "Run",
    "Side",
    "accept_missing",
    "aligned_runs",
    "batch_of",
    "blocks",
    "boundary_specs",
    "check_lengths",
    "compute_dtype",
    "cut",
    "find_paddings",
    "find_runs",
    "fold",
    "is_boundary_spec",
    "is_searched",
    "keep_whole_as_planned",
    "override",
    "pad",
    "pad_for_ranks",
    "place_in",
    "prologue_lines",
    "recomputed_operators",
    "rename_lowered",
    "rename_strategy",
    "stored_dtype",
    "values_at_matmuls",
]
