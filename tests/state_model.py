"""A small model with every kind of stored parameter, and plans for it on several meshes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from autopar.mesh import Device, Link, LogicalMesh
from autopar.spec import I, Placement, S, Spec, TensorType, local_shape
from autopar.stage_program import Local, StoredParameter


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
    (4,): {"embed.weight": Spec((S(1),)), "qkv.weight": Spec((S(0, 1),))},
}


def stored(
    name: str,
    dims: Sequence[tuple[int, ...]],
    spec: Spec,
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> StoredParameter:
    """A stored parameter as lowering would describe it."""
    tensor = TensorType(tuple(dims), dtype.itemsize, True)
    local = Local(name.replace(".", "_"), local_shape(tensor, spec, sizes), dtype, spec)
    return StoredParameter(
        name, ALIASES.get(name, ()), tensor.shape, tensor.dims, local, "step", (),
        name not in FROZEN,
    )  # fmt: skip


def plan(sizes: Sequence[int]) -> tuple[StoredParameter, ...]:
    everywhere = Spec((I,) * len(sizes))
    specs = PLANS[tuple(sizes)]
    return tuple(stored(n, dims, specs.get(n, everywhere), sizes) for n, dims in DIMS.items())


def mesh_of(sizes: Sequence[int]) -> LogicalMesh:
    names = ("dp", "tp")[: len(sizes)]
    links = (Link(1e-6, 1e-9),) * len(sizes)
    return LogicalMesh(tuple(sizes), names, links, Device(1e12, 1e11, 1e9))


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
