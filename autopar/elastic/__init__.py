"""Decides how a training run goes on after its processes ended, also on another number of ranks.

Read `kept_plans.py` (the plan for the mesh that there is now), `progress.py` (how far a run is),
`watched.py` (slow ranks are named), then `run.py` (the loop). May import `api` and what lies below
it. It is not called `resilient`: a package of that name would shadow the public function.

Hands on `resilient` and its result, `ResilientRun`.
"""

from autopar.elastic.run import ResilientRun, resilient

__all__ = ["ResilientRun", "resilient"]
