"""The `nn.Module` that trains by a plan: what `autopar.parallelize` returns.

Rooms: `agreement` (do ranks agree), `batches` (which rows a rank reads, loaders), `programs` (what
is compiled for which batch). Of the files, read `job.py` (the processes of the job),
`parameters.py` (what users hold as parameters), `optimizers.py`, `finite.py` (losses that are NaN),
`compiling.py` (`compile="auto"`), `planned_state.py` (what there is once there is a plan),
`unsharded.py` (the user's model with the values of now), `held_state.py` (calls on that),
`calls.py` and `feeding.py` (how batches reach the module), `padding.py` (does padding count),
`layers.py` (what users see of their layers), `originals.py` (the model that was given),
`surface.py` (attributes of the user's model, hooks), `habits.py` (what is refused), then
`parallel_module.py`.
May import `planning`, `passes`, `runtime` and what lies below them. Hands on `ParallelModule`,
and `Loaded`: what a loader says of its batches.
"""

from autopar.module.batches import Loaded
from autopar.module.parallel_module import ParallelModule

__all__ = [
    "Loaded",
    "ParallelModule",
]
