"""state."""

from autopar.runtime.state.access import (
    clip_grad_norm_,
    full_gradients,
    full_state_dict,
    load_state_dict,
)
from autopar.runtime.state.checkpoint import load_checkpoint, save_checkpoint
from autopar.runtime.state.dtensors import stage_device_mesh, state_dict
from autopar.runtime.state.names import all_names, constant_buffers
from autopar.runtime.state.sharding import extended, local_shard
from autopar.runtime.state.stage_state import StageState
from autopar.runtime.state.weights import changed_buffers, initial_buffers, initial_shards

__all__ = [
    "StageState",
    "all_names",
    "changed_buffers",
    "clip_grad_norm_",
    "constant_buffers",
    "extended",
    "full_gradients",
    "full_state_dict",
    "initial_buffers",
    "initial_shards",
    "load_checkpoint",
    "load_state_dict",
    "local_shard",
    "save_checkpoint",
    "stage_device_mesh",
    "state_dict",
]
