"""The machine under a recipe: where the ranks of each group are, and how long items take there.

A group of p ranks that are `stride` apart (`Recipe.group`) has

    g = gcd(p, devices per node / stride), at least 1

members in each node (`TransformerMachine.group`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.cost.hardware import (
    Hardware,
    LinkGroup,
    ProfiledDevice,
    even_group,
    share_under_matmul,
)
from autopar.cost.laws import collective_time_s, op_time_s
from autopar.cost.simulate import PartWork
from autopar.cost.transformer.layer import LayerModel
from autopar.cost.transformer.recipe import Group
from autopar.cost.transformer.work import Exchange, Item, Kernel
from autopar.errors import NotSupportedError


@dataclass(frozen=True)
class TransformerMachine:
    """Hardware that runs layers: what a device reaches under their software, and the links
    (between nodes, inside) of nodes of so many devices."""

    layer: LayerModel
    hardware: Hardware
    devices_per_node: int

    @property
    def device(self) -> ProfiledDevice:
        assert isinstance(self.hardware.device, ProfiledDevice), "as `link_hardware` makes it"
        return self.hardware.device

    @property
    def host_s(self) -> float:
        return 0.0 if self.layer.software.cuda_graphs else self.device.host_s

    def group(self, name: Group) -> LinkGroup:
        """One of the recipe's groups of ranks, with its place on nodes and links."""
        n_ranks, stride = self.layer.recipe.group(name)
        in_node = math.gcd(n_ranks, max(1, self.devices_per_node // max(stride, 1)))
        return even_group(n_ranks, in_node, self.hardware.links[-1], self.hardware.links[0])

    def exchange_s(self, kind: str, size_bytes: float, group: Group) -> float:
        """Seconds of one collective among a group's ranks."""
        if kind == "dispatch":
            return self._dispatch_s(size_bytes, self.group(group))
        return collective_time_s(kind, size_bytes, self.group(group)) if size_bytes else 0.0

    def gather_s(self, kind: str, size_bytes: float, group: Group) -> float:
        """Seconds of ZeRO-3's all_gather or reduce_scatter. Between nodes NCCL has rings alone, but
        for one rank a node since 2.23, so their latency grows with the ranks.

        DeepSpeed hands torch a list of shards, one per rank, and each is copied by a kernel of its
        own (deepspeed/runtime/zero/partition_parameters.py; torch, ProcessGroupNCCL.cpp).
        """
        on = self.group(group)
        algorithm = None if on.n_nodes == 1 else "ring"
        time_s = collective_time_s(kind, size_bytes, on, algorithm=algorithm)
        if self.layer.software.gathers_by_layer:
            return time_s
        return time_s + on.n_ranks * self.host_s + 2 * size_bytes / self.device.bytes_per_s

    def _dispatch_s(self, size_bytes: float, group: LinkGroup) -> float:
        """Seconds to send rows to the ranks of their experts: k copies of a token to k experts.

        With a thrifty dispatch, a token crosses to each node once. If its experts are equally
        likely to be anywhere, it reaches N (1 - (1 - 1/N)^k) of N nodes on average. Inside nodes it
        goes once to each rank by the same law, while further tokens arrive.
        """
        experts, software = self.layer.shape.experts, self.layer.software
        if experts is None or not software.thrifty_dispatch or group.n_ranks == 1:
            return collective_time_s("all_to_all", size_bytes, group)
        k, n_ranks, n_nodes = experts.chosen, group.n_ranks, group.n_nodes
        token_bytes = size_bytes / k
        across = (n_nodes - 1) * _share_reached(n_nodes, k)
        inside = n_ranks * _share_reached(n_ranks, k) * (1 - 1 / group.per_node)
        inside_s = token_bytes * inside * group.inside.s_per_byte
        latency_s = group.per_node * group.inside.latency_s
        if n_nodes == 1:
            return latency_s + inside_s
        across_s = token_bytes * across * group.across.s_per_byte
        return latency_s + n_nodes * group.across.latency_s + max(across_s, inside_s)

    def message_s(self, source: int, target: int) -> float:
        """Seconds of an activation, or its gradient, between two stages; 0.0 within a device."""
        recipe, each = self.layer.recipe, self.devices_per_node
        ends, inside = (source % recipe.pp, target % recipe.pp), recipe.ranks_per_stage
        if ends[0] == ends[1]:
            return 0.0
        crosses = ends[0] * inside // each != ends[1] * inside // each
        link, size = self.hardware.links[0 if crosses else -1], self.layer.input_bytes
        if recipe.sp or not self.layer.software.split_messages:
            return link.message_s(size)
        return link.message_s(size / recipe.tp) + self.exchange_s("all_gather", size, "tp")

    def work(self, items: Iterable[tuple[Item, float]], *, is_backward: bool = False) -> PartWork:
        """Forward or backward of items, each so many times."""
        found = PartWork()
        for item, n in items:
            for step in item.backward if is_backward else item.forward:
                found += self._step_work(step, is_backward).times(n)
        return found

    def _step_work(self, step: Kernel | Exchange, is_backward: bool) -> PartWork:
        device = self.device
        if isinstance(step, Kernel):
            flops = step.flops / (self._float8_ratio if step.in_float8 else 1.0)
            time_s = op_time_s(
                flops, step.size_bytes, device, self.hardware.dtype, step.kind,
                is_backward=is_backward,
            ) + (step.n_launches - 1) * device.launch_s  # fmt: skip
            return PartWork(time_s, host_s=step.n_launches * self.host_s)
        time_s = self.exchange_s(step.kind, step.size_bytes, step.group)
        hidden = self._hidden_share(step)
        return PartWork(0.0, (1 - hidden) * time_s, hidden * time_s, self.host_s)

    @property
    def _float8_ratio(self) -> float:
        if self.device.float8_rate_ratio is None:
            name = self.hardware.profile_name
            raise NotSupportedError(f"hardware profile {name!r} has no rate of float8 matmuls")
        return self.device.float8_rate_ratio

    def _hidden_share(self, step: Exchange) -> float:
        """The share of a collective that runs beside compute."""
        software = self.layer.software
        if step.group == "tp" and software.overlapped_tp:
            return share_under_matmul(step.kind, self.layer.recipe.tp)
        return float(step.group == "ep" and software.overlapped_experts)


def _share_reached(n_places: int, n_draws: int) -> float:
    """The expected share of places that at least one of `n_draws` uniform draws hits."""
    return 1.0 - (1.0 - 1.0 / n_places) ** n_draws
