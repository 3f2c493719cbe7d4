"""Which links a group of ranks crosses, and how many of its members sit in each node.

Every device has its own port into the links inside its node (NVLink), and its own port to other
nodes (its share of the node's network cards). A machine with fewer cards than devices has slower
ports in its profile. So groups side by side share no port, and the cost of a collective depends
on its own group alone:

    n_ranks    members
    n_nodes    nodes that hold them
    per_node   members in the node that holds fewest
    inside     the link between two members in one node
    across     the link between two members in different nodes; in different pods, if some are

All groups of a mesh axis run the same collective at once, and the slowest one decides. `group_on`
takes the group that spans most nodes; among those, the one with fewest members in a node.

`cost/laws/formulas.py` says how each algorithm uses a group. A ring, for instance, crosses nodes
through the ports of all members there at once, at `across.s_per_byte / per_node`, and is never
faster than inside a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from autopar.mesh import Link, LogicalMesh


@dataclass(frozen=True)
class LinkGroup:
    """The ranks of one collective and the links between them; fields as in the module docstring."""

    n_ranks: int
    n_nodes: int
    per_node: int
    inside: Link
    across: Link

    def __post_init__(self) -> None:
        assert 1 <= self.n_nodes <= self.n_ranks, self
        assert 1 <= self.per_node <= self.n_ranks // self.n_nodes, self

    @property
    def is_one_level(self) -> bool:
        """All messages cross the same kind of link."""
        return self.n_nodes in (1, self.n_ranks)

    @property
    def is_two_levels(self) -> bool:
        """Several nodes hold the members, equally many in each and more than one."""
        return not self.is_one_level and self.n_ranks == self.n_nodes * self.per_node

    @property
    def slowest(self) -> Link:
        """The slowest link that messages cross, as one port."""
        return self.inside if self.n_nodes == 1 else self.across

    @property
    def in_switch_s_per_byte(self) -> float | None:
        """Of the summing switch inside a node; None without one, or with one member per node."""
        return self.inside.in_switch_s_per_byte if self.per_node > 1 else None

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """Values of the `SYMBOLS` of `cost/laws/formulas.py` between n and gamma."""
        sizes = (self.n_ranks, self.n_nodes, self.per_node)
        levels = ((k - 1).bit_length() for k in (self.n_ranks, self.n_nodes, self.per_node))
        slowest, inside = self.slowest, self.inside
        return (
            *sizes,
            *levels,
            slowest.latency_s,
            slowest.s_per_byte,
            inside.latency_s,
            inside.s_per_byte,
            self.in_switch_s_per_byte or 0.0,
        )


def even_group(n_ranks: int, per_node: int, inside: Link, across: Link) -> LinkGroup:
    """A group of `n_ranks` with `per_node` members in each node."""
    assert n_ranks % per_node == 0, (n_ranks, per_node)
    return LinkGroup(n_ranks, n_ranks // per_node, per_node, inside, across)


def flat_group(n_ranks: int, link: Link) -> LinkGroup:
    """A group of `n_ranks` whose members are all connected by the same link."""
    return LinkGroup(n_ranks, 1, n_ranks, link, link)


def group_of(members: Iterable[int], ranks_per_node: int, inside: Link, across: Link) -> LinkGroup:
    """The group of the ranks `members`; each node holds `ranks_per_node` consecutive ranks."""
    held = Counter(rank // ranks_per_node for rank in members)
    return LinkGroup(held.total(), len(held), min(held.values()), inside, across)


def group_on(mesh: LogicalMesh, axes: Sequence[int]) -> LinkGroup:
    """The slowest group over `axes` of a mesh: the one that spans most nodes.

    Without known nodes, the slowest link of the axes connects all members.
    """
    return _group_on(mesh, tuple(axes))


@lru_cache(maxsize=1 << 12)
def _group_on(mesh: LogicalMesh, axes: tuple[int, ...]) -> LinkGroup:
    n_ranks, nodes = mesh.group_size(axes), mesh.nodes
    if nodes is None:
        links = [mesh.links[i] for i in axes if mesh.sizes[i] > 1] or [mesh.links[axes[0]]]
        return flat_group(
            n_ranks, Link(max(k.latency_s for k in links), max(k.s_per_byte for k in links))
        )
    ranks = np.arange(mesh.n_ranks).reshape(mesh.sizes) + mesh.first_rank
    others = [i for i in range(mesh.n_axes) if i not in axes]
    groups, across = ranks.transpose(*others, *axes).reshape(-1, n_ranks), nodes.across
    if nodes.pods is not None:
        n_pod_ranks, between_pods = nodes.pods
        pod_of = groups // n_pod_ranks
        across = between_pods if (pod_of != pod_of[:, :1]).any() else across
    node_of = groups // nodes.n_ranks
    # Most groups differ only in their first node.
    distinct = np.unique(node_of - node_of.min(axis=1, keepdims=True), axis=0)
    found = [group_of(row.tolist(), 1, nodes.inside, across) for row in distinct]
    return max(found, key=lambda group: (group.n_nodes, -group.per_node))
