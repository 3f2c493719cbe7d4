"""Training loops of other libraries around a parallel module: one file per library.

    accelerate.py     an `accelerate.Accelerator` with the loaders and schedules of one process
    transformers.py   a `transformers.Trainer` that trains with `pm.step`; built on the first

Lightning and plain torch need no file: `docs/frameworks.md` and `examples/` show their loops.
Import the files themselves: `from autopar.integrations.transformers import AutoparTrainer`. Only
then must the library be installed. May import all other rooms but `cli`.
"""

__all__: list[str] = []
