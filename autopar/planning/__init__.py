"""What users get from `autopar.plan`: a `Plan`, and all that follows from it.

Reading order: `bound.py` (a plan with its program: what the compilation makes of it), then
`plan.py` (the public class, and how a plan is made).
May import `passes`, `report`, `verifier`, `codegen`, `capture`, `cost`, `runtime` and what lies
below them. Hands on `Plan`, `planned` and `Bound`.
"""

from autopar.planning.bound import Bound
from autopar.planning.plan import Plan, plan_program, planned, settled_heap

__all__ = [
    "Bound",
    "Plan",
    "plan_program",
    "planned",
    "settled_heap",
]
