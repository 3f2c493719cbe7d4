"""The `nn.Module` that trains by a plan: what `autopar.parallelize` returns.

Reading order: `job.py` (the processes of the job), `compiled_step.py` (one compiled program of one
rank), `fingerprints.py` and `batches.py` (do ranks pass the same batch), `local_rows.py` (the rows
that a rank reads), `signatures.py` (which batches share a program),
`captures.py` (how many programs are kept), `parallel_module.py` (the module).
May import `planning`, `passes`, `runtime` and what lies below them. Hands on `ParallelModule`.
"""

from autopar.module.parallel_module import ParallelModule

__all__ = [
    "ParallelModule",
]
