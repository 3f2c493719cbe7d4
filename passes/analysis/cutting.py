"""Cut a captured program into one program per pipeline stage.

A stage holds consecutive operators. Its graph keeps the node names of the whole, so every fact
about the whole (types, batch, what is saved for backward) holds for the stage unchanged:

    parameters    those it uses; the first stage that uses one owns it, later ones mirror it
    inputs        those it uses; every stage is given the batch
    constants     those it uses; every stage computes them
    buffers       those it reads and those it changes; a changed buffer is on one stage only
    received      values of earlier stages that it reads, sent by the stage that computes them
    sent          its values that later stages read
    loss          on the last stage
    outputs       on the last stage, which receives those of earlier stages

A value that crosses may be placed in few ways (`boundary_specs`). Every slice of a tensor should
cross once and be gathered inside the stage that reads it. So a crossing tensor is S on each axis
of more than one rank, wherever a factor divides. Where none divides, one rank takes part: a
sent tensor is R there (its gradient P), a received one P (its gradient R). See `Boundary` in
`autopar/program/lines/stage_program.py`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import torch.fx

from autopar.errors import NotSupportedError, OptionError
from autopar.placement import I, P, R, S, Spec, TensorType, divides, illegal_reason
from autopar.program.graph import ParameterInfo, Program


def cut(
    program: Program,
    ends: Sequence[int],
    with_outputs: bool = False,
    keeps_unread: bool = True,
) -> tuple[Program, ...]:
    """One program per stage; stage k holds the operators from `ends[k-1]` up to `ends[k]`.

    `ends` are positions in `program.operators`. They strictly increase, and the last one is the
    number of operators. Without `with_outputs` the stages return the loss alone. With
    `keeps_unread` the first stage owns parameters that nothing reads.

    Raises `OptionError` for other `ends` or a loss before the last stage, and `NotSupportedError`
    for a buffer that one stage changes and another reads.
    """
    operators = list(program.operators)
    if list(ends) != sorted(set(ends)) or not ends or ends[0] < 1 or ends[-1] != len(operators):
        raise OptionError(
            f"stages that end after operators {list(ends)} do not cover {len(operators)} in order",
            hint="every stage needs an operator, and the last stage ends with the last operator",
        )
    stage_of: dict[str, int] = {}
    for stage, (first, end) in enumerate(itertools.pairwise((0, *ends))):
        stage_of |= {node.name: stage for node in operators[first:end]}
    for node in program.graph.nodes:
        if node.target is operator.getitem:
            stage_of[node.name] = stage_of[node.args[0].name]
    if program.loss is not None and stage_of[program.loss] != len(ends) - 1:
        raise OptionError(
            f"the loss is made on stage {stage_of[program.loss]} of {len(ends)}",
            hint="let the last stage begin before the loss",
        )
    cutter = _Cutter(program, stage_of, len(ends), with_outputs, keeps_unread)
    return tuple(cutter.stage(k) for k in range(len(ends)))


@dataclass
class _Cutter:
    """Builds the stages of one cut; `readers` maps value -> the stages that read it."""

    program: Program
    stage_of: dict[str, int]
    n_stages: int
    with_outputs: bool
    keeps_unread: bool
    readers: dict[str, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes = list(self.program.graph.nodes)
        self.placeholders = [node.name for node in nodes if node.op == "placeholder"]
        calls = [node for node in nodes if node.op == "call_function"]
        self.bodies: list[list[torch.fx.Node]] = [[] for _ in range(self.n_stages)]
        for node in calls:
            stage = self.stage_of[node.name]
            self.bodies[stage].append(node)
            for source in node.all_input_nodes:
                self.readers.setdefault(source.name, set()).add(stage)
        self.outputs = self.program.outputs if self.with_outputs else ()
        for name in self.outputs:
            self.readers.setdefault(name, set()).add(self.n_stages - 1)
        self.home_of = {name: self._home(name) for name in self.program.buffers}
        for name, home in self.home_of.items():
            update = self.program.buffers[name].update
            if update is not None and home is not None:
                self.readers.setdefault(update, set()).add(home)
        # Values that a later stage reads.
        made = (node.name for node in calls)
        self.crossing = [n for n in made if max(self.readers.get(n, (0,))) > self.stage_of[n]]

    def stage(self, k: int) -> Program:
        whole, is_last = self.program, k == self.n_stages - 1
        roots = [name for name in self.placeholders if self._takes(name, k)]
        stage_of, readers = self.stage_of, self.readers
        received = tuple(n for n in self.crossing if stage_of[n] < k and k in readers[n])
        sent = tuple(n for n in self.crossing if stage_of[n] == k)
        outputs = self.outputs if is_last else ()
        loss = whole.loss if is_last else None
        taken = frozenset(roots)
        buffers = {n: b for n, b in whole.buffers.items() if n in taken}
        updates = tuple(b.update for b in buffers.values() if b.update is not None)
        returned = tuple(dict.fromkeys((*((loss,) if loss else ()), *sent, *outputs, *updates)))
        prologue = whole.prologue
        if prologue is not None and not taken & set(prologue.outputs):
            prologue = None
        return replace(
            whole,
            graph=_subgraph(whole, roots, received, self.bodies[k], returned),
            parameters={
                name: self._parameter(name, info, k)
                for name, info in whole.parameters.items()
                if name in taken
            },
            buffers=buffers,
            inputs={n: i for n, i in whole.inputs.items() if n in taken or _feeds(n, prologue)},
            constants={n: c for n, c in whole.constants.items() if n in taken},
            prologue=prologue,
            seed=whole.seed if whole.seed in taken else None,
            loss=loss,
            outputs=outputs,
            received=received,
            sent=sent,
            # The key of a multi-result operator's output comes from that operator, which is absent.
            keys={**whole.keys, **{n: whole.value_key(n) for n in received}},
            _by_name={},
        )

    def _takes(self, name: str, k: int) -> bool:
        """Does stage k take this placeholder?"""
        readers = self.readers.get(name, set())
        if name in self.program.parameters:
            return k in readers or (self.keeps_unread and not readers and k == 0)
        return k in readers or self.home_of.get(name) == k

    def _home(self, name: str) -> int | None:
        """The stage that changes a buffer, or None; raises if another stage reads it."""
        info = self.program.buffers[name]
        if info.update is None:
            return None
        home = self.stage_of.get(info.update, 0)
        others = self.readers.get(name, set()) - {home}
        if others:
            raise NotSupportedError(
                f"stage {home} changes buffer `{info.name}`, which stage {min(others)} reads",
                where=self.program.where(info.update),
                hint="keep what reads and changes a buffer on one stage",
            )
        return home

    def _parameter(self, name: str, info: ParameterInfo, k: int) -> ParameterInfo:
        """The parameter on stage k: the owner keeps the aliases that no mirror uses."""
        readers = sorted(self.readers.get(name, {0}))
        mirrors = {stage: self._mirror_name(name, info, stage) for stage in readers[1:]}
        if k == readers[0]:
            left = tuple(a for a in info.aliases if a not in mirrors.values())
            return replace(info, aliases=left)
        return replace(info, name=mirrors[k], aliases=(), mirror_of=info.name)

    def _mirror_name(self, name: str, info: ParameterInfo, stage: int) -> str:
        """The alias in the module that uses it on this stage, else the owner's name."""
        for node in self.program.graph.nodes:
            if self.stage_of.get(node.name) != stage or node.op != "call_function":
                continue
            if any(source.name == name for source in node.all_input_nodes):
                module = self.program.keys.get(node.name, "").rpartition("/")[0]
                for alias in info.aliases:
                    if alias.rpartition(".")[0] == module:
                        return alias
        return info.name


def _feeds(name: str, prologue: object) -> bool:
    graph = getattr(prologue, "graph", None)
    return graph is not None and any(
        n.name == name for n in graph.graph.find_nodes(op="placeholder")
    )


def _subgraph(
    program: Program,
    roots: Sequence[str],
    received: Sequence[str],
    body: Sequence[torch.fx.Node],
    returned: Sequence[str],
) -> torch.fx.Graph:
    """A graph of some of the program's nodes, with their names."""
    graph = torch.fx.Graph()
    made: dict[torch.fx.Node, torch.fx.Node] = {}
    for name in (*roots, *received):
        old = program.node(name)
        made[old] = graph.create_node("placeholder", name, name=name)
        made[old].meta = dict(old.meta)
    for old in body:
        made[old] = graph.node_copy(old, made.__getitem__)
    for old, new in made.items():
        assert new.name == old.name, (new.name, old.name)
    graph.output(tuple(made[program.node(name)] for name in returned))
    return graph


Side = Literal["sent", "received"]


@lru_cache(maxsize=4096)
def boundary_specs(tensor: TensorType, sizes: tuple[int, ...], side: Side) -> tuple[Spec, ...]:
    """The legal specs that cut the tensor on the most axes; never empty.

    Cuts of leading dims come first, so that ties prefer the batch.
    """
    legal: dict[int, list[Spec]] = {}
    for spec in cuts(tensor, sizes, side):
        if divides(tensor, spec.placements, sizes):
            legal.setdefault(n_cut(spec), []).append(spec)
    return tuple(legal[max(legal)])


def cuts(tensor: TensorType, sizes: Sequence[int], side: Side) -> list[Spec]:
    """All specs of a crossing tensor if every factor divides; they depend on its cells only."""
    rest = R if side == "sent" else P
    cells = [S(*cell) for cell in tensor.cells]
    options = [(I,) if n == 1 else (*cells, rest) for n in sizes]
    return [Spec(placements) for placements in itertools.product(*options)]


def n_cut(spec: Spec) -> int:
    """The number of axes that cut a tensor."""
    return sum(p.is_shard for p in spec.placements)


def is_boundary_spec(tensor: TensorType, spec: Spec, sizes: Sequence[int], side: Side) -> bool:
    """May the tensor cross in this spec? An edited plan may cut fewer axes than it could."""
    rest = R if side == "sent" else P
    return illegal_reason(tensor, spec, sizes) is None and all(
        p.is_shard or p == rest for p, n in zip(spec.placements, sizes, strict=True) if n > 1
    )
