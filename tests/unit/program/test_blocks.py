"""Which modules are blocks."""

from __future__ import annotations

import pytest
from torch import nn

from autopar.program.graph import block_lists, block_of


def layer(width: int) -> nn.Module:
    """A block that has a list of its own, whose children differ."""
    return nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(width, 2 * width), nn.GELU())})


def experts(width: int) -> nn.Module:
    """A block that has a list of its own, whose children are equal."""
    return nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(width, width) for _ in range(3))})


def stage(width: int, n_blocks: int) -> nn.Module:
    blocks = nn.ModuleList(layer(width) for _ in range(n_blocks))
    return nn.ModuleDict({"blocks": blocks, "downsample": nn.Linear(width, 2 * width)})


# Model, path of a module or a parameter, its block.
CASES: dict[str, tuple[nn.Module, str, str | None]] = {
    "equal layers": (nn.ModuleList([layer(2), layer(2)]), "1.mlp.0.weight", "1"),
    "one that differs": (nn.ModuleList([layer(3), layer(2), layer(2)]), "0.mlp.0", "0"),
    "experts": (nn.ModuleList([experts(2), experts(2)]), "1.experts.2.bias", "1"),
    "stages": (nn.ModuleList([stage(2, 3), stage(4, 2)]), "1.blocks.1.mlp.0", "1.blocks.1"),
    "beside its blocks": (nn.ModuleList([stage(2, 3), stage(4, 2)]), "1.downsample", "1"),
    "a stage of one": (nn.ModuleList([stage(2, 1), stage(4, 2)]), "0.blocks.0.mlp", "0"),
    "all differ": (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)), "1.weight", "1"),
    "no list": (nn.ModuleDict({"layer1": layer(2)}), "layer1.mlp", None),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks(name: str) -> None:
    model, path, block = CASES[name]
    lists = block_lists({name: tuple(p.shape) for name, p in model.named_parameters()})
    assert block_of(path, lists) == block


def test_other_digits_are_names() -> None:
    assert block_of("layers.²") is None and block_of("layers.01") is None
