"""Decides what each rank stores of the model's state, and how whole values get in and out.

Read `names.py` (names, errors on all ranks), `stage_state.py` (one rank's part), `opening.py` (a
checkpoint, opened by all ranks), `weights.py` and `initialise.py` (initial values), `access.py`
(state dicts, the norm), `export.py` (files for others), `dcp.py` and `dtensors.py` (what PyTorch's
tools see), then `aside.py` and `loss_scale.py` (gradients of earlier steps, float16). What a
training run saves is decided in `checkpoints`.

Mainly hands on `StageState` and `initial_shards`.
"""

from autopar.runtime.state.access import (
    all_values,
    clip_grad_norm_,
    everyone,
    full_gradients,
    full_state_dict,
    load_state_dict,
    stage_group,
)
from autopar.runtime.state.aside import Aside
from autopar.runtime.state.dtensors import stage_device_mesh, state_dict
from autopar.runtime.state.export import export_weights
from autopar.runtime.state.loss_scale import LossScale, LossScaler
from autopar.runtime.state.names import (
    all_names,
    check_buffer,
    constant_buffers,
    gathered,
    match_names,
    own_rank,
    together,
    world_size,
)
from autopar.runtime.state.opening import (
    OPTIMIZER_PREFIX,
    OWN_PREFIX,
    model_shapes,
    open_newest,
)
from autopar.runtime.state.stage_state import StageState, owner_name
from autopar.runtime.state.weights import changed_buffers, initial_buffers, initial_shards

__all__ = [
    "OPTIMIZER_PREFIX",
    "OWN_PREFIX",
    "Aside",
    "LossScale",
    "LossScaler",
    "StageState",
    "all_names",
    "all_values",
    "changed_buffers",
    "check_buffer",
    "clip_grad_norm_",
    "constant_buffers",
    "everyone",
    "export_weights",
    "full_gradients",
    "full_state_dict",
    "gathered",
    "initial_buffers",
    "initial_shards",
    "load_state_dict",
    "match_names",
    "model_shapes",
    "open_newest",
    "own_rank",
    "owner_name",
    "stage_device_mesh",
    "stage_group",
    "state_dict",
    "together",
    "world_size",
]
