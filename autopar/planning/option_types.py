"""The types of the options of `plan`, `parallelize`, `verify` and `resilient`.

For editors and type checkers: a misspelt name is an error. Words are checked by `Options.of`, which
also says what each option means; programs often have them in variables of type `str`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.manual import Manual
from autopar.mesh import Mesh
from autopar.options import StageOption

# What `Mesh.of` takes: (nodes, devices per node), or devices of one node.
MeshLike: TypeAlias = Mesh | DeviceMesh | Sequence[int] | int
# A stage of `stages=`: names of its modules, and its submesh.
_Stage: TypeAlias = StageOption | tuple[str | Sequence[str], int | tuple[int, int]]


class PlanOptions(TypedDict, total=False):
    """All options; each has a default (`autopar.options.Options`)."""

    microbatches: int | Literal["auto"] | str
    schedule: (
        Literal[
            "auto", "gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v", "dualpipe-v"
        ]
        | str
    )
    stages: int | Literal["auto"] | str | Sequence[_Stage]
    mesh_shape: Literal["auto", "as-given"] | str | Mapping[str, int]
    optimizer: Literal["adamw", "sgd", "adam"] | str
    precision: Literal["model", "bf16-mixed", "bf16-autocast", "fp16-mixed", "fp64"] | str
    reduce_dtype: torch.dtype | str | None
    master_weights: bool
    memory_limit: float | str | None
    memory_margin: float | None
    recompute: Literal["auto", "none", "selective", "attention-core", "gathers", "full"] | str
    manual: Manual | None
    force: Mapping[str, str | Sequence[str]] | None
    forbid: str | Iterable[str] | None
    fallback: Literal["error", "replicate"] | str
    solver: Literal["auto", "ilp"] | str
    tolerance: float
    tie: float
    time_limit_s: float | None
    batch_dims: Mapping[str, int | None] | None
    optimizer_gather: str | Iterable[str]
    loss_fn: Callable[[Any, Any], Any] | None
    progress: bool | Callable[[str], object]
    check_every: int | None
    compile: Literal["none", "regions", "regions+graphs", "auto"] | str
    imbalance: float
    lengths: str | Iterable[tuple[int, float]] | None
    software: str
