"""What users get from `autopar.plan`: a `Plan`, and all that follows from it.

`plan.py` has the public class, its view of the compilation (`Bound`), and how a plan is made.
May import `passes`, `report`, `verifier`, `codegen`, `capture`, `cost`, `runtime` and what lies
below them. Hands on `Plan`, `planned` and `Bound`.
"""

from autopar.planning.plan import Bound, Plan, on_program, plan_program, planned, settled_heap

__all__ = [
    "Bound",
    "Plan",
    "on_program",
    "plan_program",
    "planned",
    "settled_heap",
]
