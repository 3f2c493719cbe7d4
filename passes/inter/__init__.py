"""Which stages a pipeline has: the cuts, submeshes, views and microbatch counts worth solving.

Reading order: `submeshes.py` (devices of a stage), `layers.py` (where stages may begin),
`given_stages.py` (where the user's stages end), `counts.py` (numbers of microbatches),
`contexts.py` (an axis cp), `candidate.py` (a plan before it is solved), `bounds.py` and
`layer_bounds.py` (lower bounds on stages), `messages.py` (what they send at least), `space.py` (all
pipelines), `stage_search.py` (those with one number of microbatches, best first), `orders.py`
(schedules), `recipes.py` (pipelines of equal stages).
May import `passes/intra`, `analysis` and `solvers`, and what lies below `passes`.
Mainly hands on `PipelineSpace`, `StageSearch`, `equal_pipelines` and `step_bound_s`.
"""

from autopar.passes.inter.bounds import shared_step_bound_s, step_bound_s
from autopar.passes.inter.candidate import (
    Candidate,
    StageLayout,
    n_operators,
)
from autopar.passes.inter.contexts import context_counts, rows_instead, stage_degrees
from autopar.passes.inter.counts import microbatch_counts, recipe_counts
from autopar.passes.inter.given_stages import (
    ends_by_stage,
    given_ends,
    stage_without_parameters,
)
from autopar.passes.inter.layers import Layers, balance, find_layers, operator_flops
from autopar.passes.inter.orders import PipelineOrder, has_plain_order, other_orders, plain_order
from autopar.passes.inter.recipes import (
    EqualPipeline,
    Source,
    check_experts,
    check_ranks,
    equal_pipelines,
    fewest_chunks,
    numbers_of_experts,
    recipe_limits,
)
from autopar.passes.inter.space import PipelineSpace
from autopar.passes.inter.stage_search import StageBound, StagePlan, StageSearch
from autopar.passes.inter.submeshes import (
    all_views,
    axes_text,
    check_degrees,
    check_pinned_axes,
    distinct_views,
    pinnable_views,
    pins_on,
    submesh_sizes,
    views_of,
    views_text,
)

__all__ = [
    "Candidate",
    "EqualPipeline",
    "Layers",
    "PipelineOrder",
    "PipelineSpace",
    "Source",
    "StageBound",
    "StageLayout",
    "StagePlan",
    "StageSearch",
    "all_views",
    "axes_text",
    "balance",
    "check_degrees",
    "check_experts",
    "check_pinned_axes",
    "check_ranks",
    "context_counts",
    "distinct_views",
    "ends_by_stage",
    "equal_pipelines",
    "fewest_chunks",
    "find_layers",
    "given_ends",
    "has_plain_order",
    "microbatch_counts",
    "n_operators",
    "numbers_of_experts",
    "operator_flops",
    "other_orders",
    "pinnable_views",
    "pins_on",
    "plain_order",
    "recipe_counts",
    "recipe_limits",
    "rows_instead",
    "shared_step_bound_s",
    "stage_degrees",
    "stage_without_parameters",
    "step_bound_s",
    "submesh_sizes",
    "views_of",
    "views_text",
]
