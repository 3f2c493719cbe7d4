"""The `nn.Module` that trains by a plan: what `autopar.parallelize` returns.

Reading order: `job.py` (the processes of the job), `compiled_step.py` (one compiled program of one
rank), `parameters.py` (what users hold as parameters), `optimizers.py`, `layers.py` (what users see
of their layers), `originals.py` (the model that was given), `habits.py` (what is refused),
`parallel_module.py` (the module).
May import `planning`, `passes`, `runtime` and what lies below them. Hands on `ParallelModule`.
"""

from autopar.module.parallel_module import ParallelModule

__all__ = [
    "ParallelModule",
]
