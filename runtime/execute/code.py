"""What a generated file is to those that run it: its functions, and the services that they use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.collectives import Messenger
from autopar.runtime.groups import Group


@dataclass
class Environment:
    """The runtime services that generated code and the executor use.

    `groups` are those of the rank's mesh, which all its stages have. `world` (a group of all ranks)
    and `messenger` join the stages, and may be missing when there is one stage.
    """

    device: torch.device
    groups: Mapping[tuple[int, ...], Group]
    messenger: Messenger | None = None
    world: Group | None = None

    def group(self, axes: tuple[int, ...]) -> Group:
        return self.groups[axes]


@dataclass(frozen=True)
class StageCode:
    """The compiled functions of one generated file.

    forward    (parameters, delivered[, received], env) -> (results), [saved]
    loss       (taken, env) -> the loss, from what forward returned in its place, when the step
               ends. None if forward returns the loss itself
    backward   (saved, cotangents, ready, env); calls `ready(k, gradient)` for the gradients of the
               parameters, then of what was received. None for a program without backward
    backward_input, backward_weight
               backward in two parts: (saved, cotangents, ready, env) -> [kept], and
               (kept, ready, env). None if the program has backward in one part
    has_graphs  are results of its regions valid until the next step begins, and no longer?
    """

    forward: Callable[..., tuple[tuple[Any, ...], list[Any]]]
    backward: Callable[..., None] | None
    prologue: Callable[..., tuple[Tensor, ...]] | None
    loss: Callable[..., Tensor] | None = None
    backward_input: Callable[..., list[Any]] | None = None
    backward_weight: Callable[..., None] | None = None
    has_graphs: bool = False
