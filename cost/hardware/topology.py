"""Which links a group of ranks crosses, and how many of its members share each node's ports.

Every device has a port of its own into the links inside its node (NVLink), and one to other nodes
(its share of the node's network cards): a machine with fewer cards than devices has slower ports
in its profile. So groups that lie side by side share nothing, and what a collective costs follows
from its own group alone:

    n_ranks    members
    n_nodes    nodes that hold them
    per_node   the fewest members that one of those nodes holds
    inside     the link of two members in one node; across: of two in different nodes

Of the groups of a mesh axis, which all run the same collective at once, the one that spans most
nodes decides; among those, the one with fewest members in a node (`group_on`). What each algorithm
makes of a group is in `formulas.py`: a ring crosses nodes on the ports of all members there at
once, `across.s_per_byte / per_node`, and is never faster than inside a node.
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
    """The ranks of one collective, and the links between them. See the module for the fields."""

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
        """Several nodes hold as many members each, and more than one."""
        return not self.is_one_level and self.n_ranks == self.n_nodes * self.per_node

    @property
    def slowest(self) -> Link:
        """One port on the slowest link that messages cross."""
        return self.inside if self.n_nodes == 1 else self.across

    @property
    def in_switch_s_per_byte(self) -> float | None:
        """Of the switch that sums inside its nodes; None where there is none, or one member."""
        return self.inside.in_switch_s_per_byte if self.per_node > 1 else None

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The symbols of `formulas.SYMBOLS` between n and gamma."""
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
    """`n_ranks` with `per_node` in each of their nodes."""
    assert n_ranks % per_node == 0, (n_ranks, per_node)
    return LinkGroup(n_ranks, n_ranks // per_node, per_node, inside, across)


def flat_group(n_ranks: int, link: Link) -> LinkGroup:
    """`n_ranks` that are all linked alike."""
    return LinkGroup(n_ranks, 1, n_ranks, link, link)


def group_of(members: Iterable[int], ranks_per_node: int, inside: Link, across: Link) -> LinkGroup:
    """The group of ranks `members`; nodes hold consecutive ranks, `ranks_per_node` each."""
    held = Counter(rank // ranks_per_node for rank in members)
    return LinkGroup(held.total(), len(held), min(held.values()), inside, across)


def group_on(mesh: LogicalMesh, axes: Sequence[int]) -> LinkGroup:
    """The group over `axes` of a view that takes longest: the one that spans most nodes.

    A view that knows no nodes links all members by the slowest of its axes' links.
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
    node_of = ranks.transpose(*others, *axes).reshape(-1, n_ranks) // nodes.n_ranks
    # Most groups lie alike: only where they begin differs.
    alike = np.unique(node_of - node_of.min(axis=1, keepdims=True), axis=0)
    found = [group_of(row.tolist(), 1, nodes.inside, nodes.across) for row in alike]
    return max(found, key=lambda group: (group.n_nodes, -group.per_node))
