"""Decides what each rank stores of the model's state, and how whole values get in and out.

Read `names.py` (names, errors on all ranks), `stage_state.py` (one rank's part), `weights.py` and
`initialise.py` (initial values), `access.py` (state dicts, the norm), `dcp.py` and `dtensors.py`
(what PyTorch's tools see), `loss_scale.py` (float16), then `optimizer_state.py` and
`checkpoint.py`. It is the top room of the
runtime and may import all the others.

Hands on `StageState`, `initial_shards` and `save_checkpoint`.
"""

from autopar.runtime.state.access import (
    clip_grad_norm_,
    everyone,
    full_gradients,
    full_state_dict,
    load_state_dict,
)
from autopar.runtime.state.checkpoint import load_checkpoint, save_checkpoint
from autopar.runtime.state.dtensors import stage_device_mesh, state_dict
from autopar.runtime.state.loss_scale import LossScale, LossScaler
from autopar.runtime.state.names import StateError, all_names, constant_buffers, together
from autopar.runtime.state.stage_state import StageState
from autopar.runtime.state.weights import changed_buffers, initial_buffers, initial_shards

__all__ = [
    "LossScale",
    "LossScaler",
    "StageState",
    "StateError",
    "all_names",
    "changed_buffers",
    "clip_grad_norm_",
    "constant_buffers",
    "everyone",
    "full_gradients",
    "full_state_dict",
    "initial_buffers",
    "initial_shards",
    "load_checkpoint",
    "load_state_dict",
    "save_checkpoint",
    "stage_device_mesh",
    "state_dict",
    "together",
]
