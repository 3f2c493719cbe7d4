"""A small model with every kind of stored parameter, and plans for it on stages and meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.mesh import LogicalMesh
from autopar.placement import I, Placement, S, Spec, TensorType, local_shape
from autopar.program.lines import Local, Pipeline, StageProgram, StoredParameter
from autopar.runtime.collectives import DistMessenger
from autopar.runtime.groups import make_groups, world_group
from autopar.runtime.launch import ThreadWorld
from autopar.runtime.state import StageState
from tests.helpers.machines import mesh_of

Sizes = tuple[int, ...]
Shapes = tuple[Sizes, ...]
ONE: Shapes = ((1, 1),)
PAIR: Shapes = ((1, 2),)
# One stage, and stages of unlike meshes, of which the first is one rank or several. A stage of the
# shape () is a second one on the ranks of the first stage.
SHAPES_OF_4: tuple[Shapes, ...] = (
    ((2, 2),),
    ((1, 1), (1, 3)),
    ((1, 2), (2, 1)),
    ((1, 1), (1, 2), (1, 1)),
    ((1, 2), (1, 2), ()),
)
CPU = torch.device("cpu")


class Tied(nn.Module):
    """Tied embedding and head, a fused projection, a frozen scale, a scalar, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(8)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)


# Factors of each whole tensor: qkv's dim 0 is 3 x 4 heads x 2.
DIMS: dict[str, tuple[tuple[int, ...], ...]] = {
    "embed.weight": ((16,), (8,)),
    "qkv.weight": ((3, 4, 2), (8,)),
    "qkv.bias": ((3, 4, 2),),
    "norm.weight": ((8,),),
    "norm.bias": ((8,),),
    "gain": (),
}
ALIASES = {"embed.weight": ("head.weight",)}
FROZEN = ("norm.bias",)

# Specs on a mesh (a, b). On (2, 2) embed is split by both axes out of mesh order, qkv.weight by
# both on one strided factor, which DTensor cannot express.
PLANS: dict[tuple[int, ...], dict[str, Spec]] = {
    (1, 1): {},
    (1, 2): {
        "embed.weight": Spec((I, S(0))),
        "qkv.weight": Spec((I, S(0, 1))),
        "qkv.bias": Spec((I, S(0, 2))),
        "norm.weight": Spec((I, S(0))),
    },
    (2, 2): {
        "embed.weight": Spec.of((S(0), S(0)), (1, 0)),
        "qkv.weight": Spec((S(0, 1), S(0, 1))),
        "qkv.bias": Spec((I, S(0, 1))),
        "norm.weight": Spec((S(0), S(0))),
        "norm.bias": Spec((S(0), I)),
    },
    (1, 3): {"qkv.weight": Spec((I, S(0, 0))), "qkv.bias": Spec((I, S(0, 0)))},
    (2, 1): {"embed.weight": Spec((S(1), I)), "qkv.weight": Spec((S(1), I))},
    (4,): {"embed.weight": Spec((S(1),)), "qkv.weight": Spec((S(0, 1),))},
}


# Number of stages -> what each keeps: name -> the owner it mirrors. The head has a name of its
# own, for two stages in one case; the fused projection has none.
STAGES: dict[int, tuple[dict[str, str | None], ...]] = {
    1: (dict.fromkeys(DIMS),),
    2: (
        dict.fromkeys(("embed.weight", "qkv.weight", "qkv.bias", "gain")),
        {
            **dict.fromkeys(("norm.weight", "norm.bias")),
            "qkv.weight": "qkv.weight",
            "head.weight": "embed.weight",
        },
    ),
    3: (
        dict.fromkeys(("embed.weight", "qkv.weight")),
        {"qkv.bias": None, "head.weight": "embed.weight"},
        {
            **dict.fromkeys(("norm.weight", "norm.bias", "gain")),
            "qkv.weight": "qkv.weight",
            "head.weight": "embed.weight",
        },
    ),
}


def stored(
    name: str,
    dims: Sequence[tuple[int, ...]],
    spec: Spec,
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
    aliases: tuple[str, ...] = (),
    mirror_of: str | None = None,
) -> StoredParameter:
    """A stored parameter as lowering would describe it."""
    tensor = TensorType(tuple(dims), dtype.itemsize, True)
    local = Local(name.replace(".", "_"), local_shape(tensor, spec, sizes), dtype, spec)
    return StoredParameter(
        name, aliases, tensor.shape, tensor.dims, local, "step", (),
        name not in FROZEN, mirror_of,
    )  # fmt: skip


def plan(
    sizes: Sequence[int], kept: Mapping[str, str | None] = STAGES[1][0]
) -> tuple[StoredParameter, ...]:
    """What one stage keeps; without `kept`, the only one."""
    everywhere, specs = Spec((I,) * len(sizes)), PLANS[tuple(sizes)]
    out = []
    for name, owner in kept.items():
        key = owner or name
        aliases = ALIASES.get(name, ()) if len(kept) == len(DIMS) else ()
        spec = specs.get(key, everywhere)
        out.append(stored(name, DIMS[key], spec, sizes, aliases=aliases, mirror_of=owner))
    return tuple(out)


def pipeline_of(
    shapes: Sequence[Sizes], cut: Sequence[Mapping[str, str | None]] | None = None
) -> Pipeline:
    """The model cut into a stage per shape, on consecutive ranks; as in `STAGES` unless told."""
    meshes: list[LogicalMesh] = []
    stages, first = [], 0
    for kept, sizes in zip(cut or STAGES[len(shapes)], shapes, strict=True):
        if not sizes:  # a parameter has another name on each stage of a rank
            kept = {name: owner for name, owner in kept.items() if name != owner}
        mesh = replace(mesh_of(*sizes), first_rank=first) if sizes else meshes[0]
        sizes = mesh.sizes
        stages.append(
            StageProgram("tied", mesh.names, sizes, plan(sizes, kept), (), (), None, (), 1)
        )
        first += mesh.n_ranks if mesh not in meshes else 0
        meshes.append(mesh)
    return Pipeline.of(stages, meshes)


def process_place(pipeline: Pipeline) -> StageState:
    """This process's place; every rank calls it."""
    if not dist.is_initialized():
        return StageState(pipeline, 0, CPU)
    rank = dist.get_rank()
    groups = [make_groups(mesh) for mesh in pipeline.device_meshes]
    own = groups[pipeline.device_of(rank)]
    return StageState(pipeline, rank, CPU, own, DistMessenger(CPU), world_group())


def thread_place(pipeline: Pipeline, world: ThreadWorld) -> StageState:
    groups = [world.make_groups(mesh) for mesh in pipeline.device_meshes]
    own = groups[pipeline.device_of(world.rank)]
    messenger = world.messenger(rendezvous=True)
    return StageState(pipeline, world.rank, CPU, own, messenger, world.world_group())


def seeded_model(seed: int = 0) -> Tied:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Tied()
        assert model.norm.running_mean is not None
        model.norm.running_mean.normal_()
        return model


def gradient(name: str, shape: Sequence[int], step: int) -> Tensor:
    """The whole gradient of a parameter in a given step; the same on every rank."""
    seed = sum(map(ord, name)) + 1000 * step
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def storable(placement: Placement) -> bool:
    return placement == I or placement.is_shard
