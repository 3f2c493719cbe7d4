"""How one program is placed on one logical mesh: the fastest strategies within a memory budget.

Reading order: `cases.py`, `constraints.py` (what is allowed; recipes), `at_loss.py` (what is live
there), `member_prices.py`, `candidates.py` (choices of groups), `parameters.py` (storage),
`priced.py` (what problems share), `hiding.py` (what compute hides), `problem.py` (the choice
problem), `builder.py` (builds it), `rerun.py` and `recompute_choice.py` (recompute in it),
`intra_op.py` (many problems at once), `least.py` (bounds without a solver), `repeated.py` (repeated
blocks), `chooser.py` (solve and read back).
May import `passes/analysis`, `passes/reshard`, the solvers and everything below `passes`.
Mainly hands on `Chooser`, `choose` and `intra_op_problem`.
"""

from autopar.passes.intra.chooser import (
    Chooser,
    Chosen,
    PlacementRequest,
    choose,
    too_little_memory,
)
from autopar.passes.intra.constraints import (
    SPLIT_BATCH,
    AxisPin,
    Constraints,
    Role,
    recipe_cost,
    recipe_roles,
)
from autopar.passes.intra.intra_op import (
    ProblemBatch,
    ProblemFamilies,
    intra_op_problem,
)
from autopar.passes.intra.least import (
    LeastRerun,
    least_bytes,
    least_phases_s,
    least_shared_bytes,
    least_static_bytes,
    least_step_s,
    least_times_s,
    shared_s,
    static_parts,
    unpadded_static_bytes,
)
from autopar.passes.intra.member_prices import Moved, joint_lowering, operator_times_s
from autopar.passes.intra.priced import Prices
from autopar.passes.intra.problem import IntraOpProblem

__all__ = [
    "SPLIT_BATCH",
    "AxisPin",
    "Chooser",
    "Chosen",
    "Constraints",
    "IntraOpProblem",
    "LeastRerun",
    "Moved",
    "PlacementRequest",
    "Prices",
    "ProblemBatch",
    "ProblemFamilies",
    "Role",
    "choose",
    "intra_op_problem",
    "joint_lowering",
    "least_bytes",
    "least_phases_s",
    "least_shared_bytes",
    "least_static_bytes",
    "least_step_s",
    "least_times_s",
    "operator_times_s",
    "recipe_cost",
    "recipe_roles",
    "shared_s",
    "static_parts",
    "too_little_memory",
    "unpadded_static_bytes",
]
