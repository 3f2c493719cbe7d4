"""Decides what a checkpoint of a training run holds, and how it is saved and loaded whole.

Read `contents.py` (what a module gives, and which rank writes which part), `optimizer_state.py`,
`several.py`, `trees.py` and `random_state.py` (states of other objects and of generators), then
`saving.py`, `loading.py` and `async_saver.py`; `replicas.py` compares ranks, `converting.py` reads
old formats.
It is the top room of the runtime and may import all the others.

Mainly hands on `save`, `load`, `AsyncSaver`, `check_replicas` and `convert`.
"""

from autopar.runtime.checkpoints.async_saver import AsyncSaver
from autopar.runtime.checkpoints.contents import ModuleState
from autopar.runtime.checkpoints.converting import convert
from autopar.runtime.checkpoints.loading import load
from autopar.runtime.checkpoints.replicas import check_replicas
from autopar.runtime.checkpoints.saving import save
from autopar.runtime.checkpoints.several import Optimizers

__all__ = ["AsyncSaver", "ModuleState", "Optimizers", "check_replicas", "convert", "load", "save"]
