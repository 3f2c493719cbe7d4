"""What users get from `autopar.plan`: a `Plan`, and all that follows from it.

`option_types.py` has the types of the options, `plan.py` the public class and how a plan is made,
`bound.py` its view of the compilation, `commands.py` texts that plan again, and `page.py` what its
page shows.
May import `passes`, `report`, `verifier`, `codegen`, `capture`, `cost`, `runtime` and what lies
below them. Mainly hands on `Plan`, `planned` and `Bound`.
"""

from autopar.planning.bound import Bound, bind, settled_heap
from autopar.planning.commands import ShellModel
from autopar.planning.option_types import MeshLike, PlanOptions
from autopar.planning.plan import Plan, on_program, plan_program, planned

__all__ = [
    "Bound",
    "MeshLike",
    "Plan",
    "PlanOptions",
    "ShellModel",
    "bind",
    "on_program",
    "plan_program",
    "planned",
    "settled_heap",
]
