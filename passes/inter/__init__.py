"""Which stages a pipeline has: the cuts, submeshes, views and microbatch counts worth solving.

Reading order: `submeshes.py` (devices of a stage), `layers.py` (where stages may begin),
`candidate.py` (a plan before it is solved), `crossings.py`, `attribution.py` and `tables.py` (what
a range of layers costs), `estimates.py` (what solved stages teach), `score.py` (a step's time),
`bounds.py`, `layer_bounds.py` and `rerun_bounds.py` (lower bounds), `stage_search.py` (one
microbatch count), `joint.py` (all counts), `recipes.py` (Megatron pipelines).
May import `passes/intra`, `analysis`, `reshard` and `solvers`, and what lies below `passes`.
Hands on `joint_search`, `recipe_candidates` and `step_s`.
"""

from autopar.passes.inter.candidate import (
    Candidate,
    StageLayout,
    check_submesh,
    ends_by_modules,
    ends_by_stage,
    n_operators,
)
from autopar.passes.inter.joint import JointSearch, Progress, different, joint_search
from autopar.passes.inter.recipes import check_ranks, recipe_candidates, recipe_limits
from autopar.passes.inter.score import StageBoundary, StageSeconds, step_s
from autopar.passes.inter.stage_search import SearchedPlan
from autopar.passes.inter.submeshes import (
    all_views,
    axes_text,
    check_degrees,
    check_pinned_axes,
    distinct_views,
    pins_on,
    submesh_sizes,
    views_of,
    views_text,
    with_pinned_axes,
)

__all__ = [
    "Candidate",
    "JointSearch",
    "Progress",
    "SearchedPlan",
    "StageBoundary",
    "StageLayout",
    "StageSeconds",
    "all_views",
    "axes_text",
    "check_degrees",
    "check_pinned_axes",
    "check_ranks",
    "check_submesh",
    "different",
    "distinct_views",
    "ends_by_modules",
    "ends_by_stage",
    "joint_search",
    "n_operators",
    "pins_on",
    "recipe_candidates",
    "recipe_limits",
    "step_s",
    "submesh_sizes",
    "views_of",
    "views_text",
    "with_pinned_axes",
]
