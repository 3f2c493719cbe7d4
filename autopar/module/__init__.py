"""The `nn.Module` that trains by a plan: what `autopar.parallelize` returns.

Reading order: `job.py` (the processes of the job), `compiled_step.py` (one compiled program of one
rank), `programs.py` (all of them), `signatures.py`, `variants.py`, `captures.py` (which is run, how
many are kept), `fingerprints.py` and `batches.py` (do ranks pass the same batch), `local_rows.py`
(the rows that a rank reads), `parameters.py` (what users hold as parameters), `optimizers.py`,
`assembly.py`, `loaded.py`, `loading.py` (a loader's batches), `padding.py` (does padding count),
`feeding.py` (how batches reach the module), `layers.py` (what users see of their layers),
`originals.py` (the model that was given), `surface.py` (attributes of the user's model, hooks),
`habits.py` (what is refused), `parallel_module.py` (the module).
May import `planning`, `passes`, `runtime` and what lies below them. Hands on `ParallelModule`.
"""

from autopar.module.parallel_module import ParallelModule

__all__ = [
    "ParallelModule",
]
