"""Lowering: from a strategy to the lines that each rank runs.

Operators keep the captured order. A tensor is resharded right before the first operator that reads
it in another spec, once per distinct spec, along the cheapest path. The operator's rule localises
arguments that carry sizes.

Stages are lowered one by one (`lower`) and joined into a pipeline (`join`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch.fx

from autopar.cost.laws import CostModel
from autopar.passes.analysis import (
    Analysis,
    PlacedOperator,
    boundary_specs,
    override,
    prologue_lines,
    values_at_matmuls,
)
from autopar.passes.lowering.fusion import fuse_bias
from autopar.passes.lowering.gathers import with_gathers_first, with_shared_prices
from autopar.passes.lowering.head_tail import fold_alike, fold_shards, folded_axis
from autopar.passes.lowering.line_costs import LineCosts
from autopar.passes.lowering.placed_stage import PlacedStage
from autopar.passes.lowering.segments import with_segments
from autopar.passes.reshard import MoveStep, reshard_table, step_time_s
from autopar.placement import I, R, Spec, TensorType, canonical_spec, local_shape, without_gradient
from autopar.program.graph import Accumulation, BufferInfo, Operator
from autopar.program.lines import (
    DEVICE,
    UNUSED,
    Boundary,
    CallLine,
    ChangedBuffer,
    Delivered,
    DetachLine,
    GatherLine,
    Line,
    Local,
    MoveLine,
    OperatorStrategy,
    ParameterUse,
    Pipeline,
    Ref,
    StageProgram,
    Storage,
    StoredParameter,
    Strategy,
    free_name,
    group_name,
    identifier,
    reserved_names,
    suffix,
)
from autopar.rules import FOLDED, GROUP, rule_for
from autopar.schedule import ORDERS, forward_only

# A move, and its forward and backward seconds.
_TimedStep = tuple[MoveStep, float, float]


def lower(
    analysis: Analysis, strategy: Strategy, cost: CostModel, with_outputs: bool = False,
    may_fold: bool = True,
) -> StageProgram:  # fmt: skip
    """The stage program of a strategy; `with_outputs` also returns the model's outputs whole.

    If it `may_fold`, causal sequences are in head-tail order where they can be (`head_tail.py`).
    """
    return _Lowering(analysis, strategy, cost, with_outputs, may_fold).run()


@dataclass
class _Lowering:
    analysis: Analysis
    strategy: Strategy
    cost: CostModel
    with_outputs: bool
    may_fold: bool
    folded: int | None = None
    body: list[Line] = field(default_factory=list)
    produced: dict[str, Spec] = field(default_factory=dict)
    variables: dict[tuple[str, Spec], str] = field(default_factory=dict)
    shards: dict[str, str] = field(default_factory=dict)  # parameter -> its stored variable
    taken: set[str] = field(default_factory=set)
    delivered: dict[tuple[str, Spec], Delivered] = field(default_factory=dict)
    constants: dict[tuple[Any, ...], str] = field(default_factory=dict)
    # Caches of what repeated blocks share.
    locals: dict[tuple[str, str, Spec], Local] = field(default_factory=dict)
    shapes: dict[tuple[TensorType, Spec], tuple[int, ...]] = field(default_factory=dict)
    steps: dict[tuple[TensorType, Spec, Spec, bool, bool], list[_TimedStep]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.program = self.analysis.program
        self.sizes = self.cost.mesh.sizes
        self.active = self.cost.mesh.active_axes
        self.types = self.strategy.types
        self.stage = PlacedStage(self.analysis, self.strategy, self.cost)
        if self.may_fold:
            self.folded = folded_axis(self.stage)
        self.line_costs = LineCosts(self.analysis, self.strategy, self.cost, self.folded)
        self.taken |= reserved_names(self.cost.mesh.names)

    def run(self) -> StageProgram:
        parameters = tuple(self._parameter(n) for n in self.program.parameters)
        received = tuple(self._receive(n) for n in self.program.received)
        for item in self.analysis.placed_operators(self.strategy.n_microbatches):
            self._operator(item, self.strategy.operators[item.name])
        loss = self._loss() if self.program.loss is not None else None
        sent = tuple(self._send(n) for n in self.program.sent)
        changed = tuple(self._changed(b) for b in self.program.buffers.values() if b.update)
        outputs = tuple(self._output(n) for n in self.program.outputs) if self.with_outputs else ()
        kept = {loss, *outputs, *(s.local.name for s in sent), *(b.local.name for b in changed)}
        prologue = self.program.prologue
        lowered = StageProgram(
            self.program.model_name,
            self.cost.mesh.names,
            self.sizes,
            parameters,
            tuple(self.delivered.values()),
            tuple(with_gathers_first(fuse_bias(self.body, parameters, kept))),
            loss,
            outputs,
            self.strategy.n_microbatches,
            prologue_lines(prologue.graph.graph) if prologue else (),
            tuple(n.name for n in prologue.graph.graph.nodes if n.op == "placeholder")
            if prologue
            else (),
            prologue.outputs if prologue else (),
            received,
            sent,
            self.program.training,
            changed,
            self._accumulation(),
            is_compiled=self.cost.kernels == "compiled",
        )
        again = with_segments(lowered, self.strategy.recomputed, self.program)
        priced = with_shared_prices(again, self.cost)
        return priced if self.folded is None else fold_shards(priced, self.folded)

    def _accumulation(self) -> Accumulation | None:
        """The accumulation with inputs by placeholder, as a stage knows them."""
        if self.program.accumulation is None:
            return None
        dims, inputs = self.program.accumulation.dims, self.program.inputs
        by_placeholder = {n: dims[i.path] for n, i in inputs.items() if i.path in dims}
        return Accumulation(self.program.accumulation.n, by_placeholder)

    def _unique(self, wanted: str) -> str:
        name = free_name(identifier(wanted), self.taken)
        self.taken.add(name)
        return name

    def _local(self, name: str, value: str, spec: Spec) -> Local:
        key = name, value, spec
        if key not in self.locals:
            self.locals[key] = self._placed(name, value, self.types[value], spec)
        return self.locals[key]

    def _placed(self, name: str, value: str, tensor: TensorType, spec: Spec) -> Local:
        key = tensor, spec
        if key not in self.shapes:
            self.shapes[key] = local_shape(tensor, spec, self.sizes)
        info = self.program.parameters.get(value)
        return Local(
            name, self.shapes[key], self.analysis.dtypes[value], spec, tensor.dims,
            tensor.has_grad, info.reduce_dtype if info else None, self.stage.factor_kinds(value),
        )  # fmt: skip

    def _moves(
        self, value: str, tensor: TensorType, source: Spec, target: Spec,
        first: str, name: str, phase: str, is_chain: bool = False,
    ) -> tuple[MoveLine, ...]:  # fmt: skip
        """The lines of a reshard from the variable `first` to `name`.

        A chain is one expression in the generated program, so its intermediates need no names.
        """
        lines, at = [], first
        restricted = self.strategy.sequence_forbidden and value not in self.program.parameters
        under_matmul = self.cost.hides_tp and value in values_at_matmuls(self.program)
        steps = self._steps(tensor, source, target, restricted, under_matmul)
        for k, (step, forward, backward) in enumerate(steps, start=1):
            own = name if k == len(steps) or is_chain else self._unique(f"{name}_{k}")
            out = self._placed(own, value, tensor, step.target)
            lines.append(
                MoveLine(
                    out, at, step.move, value, phase, step.forward_bytes,
                    step.backward_bytes if tensor.has_grad else 0, forward, backward,
                    tensor.has_grad, under_matmul,
                )
            )  # fmt: skip
            at = own
        return tuple(lines)

    def _steps(
        self, tensor: TensorType, source: Spec, target: Spec, restricted: bool, under_matmul: bool
    ) -> list[_TimedStep]:
        """The moves of the cheapest path, with their seconds."""
        key = tensor, source, target, restricted, under_matmul
        if key not in self.steps:
            cost = replace(self.cost, hides_tp=under_matmul)
            path = reshard_table(tensor, cost, restricted).path(source, target)
            price, grad = self.cost.primitive_time_s, tensor.has_grad
            self.steps[key] = [(step, *step_time_s(step, grad, price)) for step in path]
        return self.steps[key]

    @cached_property
    def _uses(self) -> Mapping[str, Mapping[Spec, None]]:
        """Per parameter, the distinct specs that operators use it in, in order."""
        used: dict[str, dict[Spec, None]] = {name: {} for name in self.program.parameters}
        for operator in self.analysis.operators:
            chosen = self.strategy.operators[operator.name]
            for value, spec in zip(operator.inputs, chosen.inputs, strict=True):
                if value in used:
                    used[value].setdefault(spec)
        return used

    def _parameter(self, name: str) -> StoredParameter:
        info, storage = self.program.parameters[name], self._storage(name)
        base, uses = self._unique(info.name), self._uses[name]
        self.shards[name] = base
        shard = self._local(base, name, storage.spec)
        stored, cast, cast_s = shard, None, 0.0
        if info.dtype != shard.dtype:
            stored, cast = replace(shard, dtype=info.dtype, gradient_dtype=None), shard
            cast_s = self.cost.cast_time_s(stored.size_bytes + cast.size_bytes)
        converted = []
        for spec in uses:
            if storage.period == "use":
                break
            plain = spec == storage.spec or len(uses) == 1
            variable = base if plain else self._unique(f"{base}_as_{suffix(spec, self.active)}")
            moves = self._moves(
                name, self.types[name], storage.spec, spec, base, variable, "param_gather", True
            )
            converted.append(ParameterUse(self._local(variable, name, spec), moves))
            self.variables[name, spec] = variable
        return StoredParameter(
            info.name, info.aliases, info.shape, self.types[name].dims, stored, storage.period,
            tuple(converted), info.requires_grad, info.mirror_of, cast, cast_s,
        )  # fmt: skip

    def _storage(self, name: str) -> Storage:
        """How a parameter is stored, with a spec that its type allows: a frozen one has no I."""
        storage = self.strategy.storage[name]
        return replace(storage, spec=canonical_spec(self.types[name], storage.spec, self.sizes))

    def _gather(self, name: str, spec: Spec, storage: Storage) -> str:
        base = self.shards[name]
        variable = self._unique(f"{base}_gathered")
        moves = self._moves(
            name, self.types[name], storage.spec, spec, base, variable, "param_gather", True
        )
        if not moves:
            return base
        self.body.append(
            GatherLine(
                self._local(variable, name, spec),
                base,
                self.program.parameters[name].name,
                moves,
                self.program.parameter_block(name),
            )
        )
        return variable

    def _argument(self, operator: Operator, position: int, spec: Spec) -> str:
        """The variable that holds an operator's input in the spec that it reads."""
        value = operator.inputs[position]
        if value in self.program.parameters:
            storage = self._storage(value)
            if storage.period == "use":
                return self._gather(value, spec, storage)
            return self.variables[value, spec]
        if value not in self.produced:
            return self._deliver(value, spec)
        return self._resharded(value, spec)

    def _deliver(self, value: str, spec: Spec) -> str:
        value = self._first_equal(value)
        if (value, spec) not in self.delivered:
            kind, source = "input" if value in self.program.inputs else "constant", value
            if value in self.program.buffers:
                kind, source = "buffer", self.program.buffers[value].name
            if self.program.prologue and value in self.program.prologue.outputs:
                kind = "divisor"
            if value == self.program.seed:
                kind = "seed"
            first = not any(v == value for v, _ in self.delivered)
            name = source if first else f"{source}_as_{suffix(spec, self.active)}"
            self.delivered[value, spec] = Delivered(
                self._local(self._unique(name), value, spec), source, kind,
                self.types[value].dims,
                self.strategy.batch_cells.get(value),
            )  # fmt: skip
        return self.delivered[value, spec].local.name

    def _first_equal(self, value: str) -> str:
        """The first constant that is the same tensor, sharded alike; only this one is delivered.

        A value that is no constant stands for itself.
        """
        constant = self.program.constants.get(value)
        if constant is None:
            return value
        key = (constant, self.types[value].dims, self.strategy.batch_cells.get(value))
        return self.constants.setdefault(key, value)

    def _resharded(self, value: str, spec: Spec, phase: str = "forward") -> str:
        source = self.produced[value]
        if spec == source:
            return self.variables[value, source]
        if (value, spec) not in self.variables:
            first = self.variables[value, source]
            name = self._unique(f"{first}_as_{suffix(spec, self.active)}")
            self.body += self._moves(value, self.types[value], source, spec, first, name, phase)
            self.variables[value, spec] = name
        return self.variables[value, spec]

    def _operator(self, item: PlacedOperator, chosen: OperatorStrategy) -> None:
        operator, target = item.operator, str(item.operator.call.op)
        node, rule = self.program.node(operator.name), rule_for(target)
        names = [self._argument(operator, i, s) for i, s in enumerate(chosen.inputs)]
        outs = []
        for value, spec in zip(operator.outputs, chosen.outputs, strict=True):
            unused = ":" in value
            variable = UNUSED if unused else self._unique(value)
            outs.append(self._local(variable, value, spec))
            self.produced[value] = spec
            self.variables[value, spec] = variable
        inputs = [
            self._local(name, value, spec)
            for name, value, spec in zip(names, operator.inputs, chosen.inputs, strict=True)
        ]
        args, kwargs = self._arguments(node, operator, names)
        if rule.localise is not None:
            shapes = [i.shape for i in inputs], [o.shape for o in outs]
            args, kwargs = override(node, args, kwargs, rule.localise(operator.call, *shapes))
        if chosen.lowered is not None:
            args = self._lowered_arguments(operator, chosen, args, kwargs)
            kwargs = {}
        price = self.line_costs.price(item, chosen)
        share = self.line_costs.share(operator, price)
        inner = self.line_costs.inner(operator, chosen, inputs, outs, price)
        saved_bytes, keeps = self.line_costs.kept(operator, chosen, inputs, outs, share)
        self.body.append(
            CallLine(
                tuple(outs), target, args, kwargs, self.program.keys[node.name],
                self.program.sources.get(node.name, ""),
                chosen.lowered.function if chosen.lowered else None, chosen.lowered_axes, inner,
                price.flops, price.forward_s, price.backward_s, price.again_s, saved_bytes, keeps,
                self.line_costs.storage_of(operator, names), price.model_flops,
                self.line_costs.workspace(operator, chosen, inputs, outs, share),
                self.program.block(operator.name),
            )
        )  # fmt: skip

    def _arguments(
        self, node: torch.fx.Node, operator: Operator, names: Sequence[str]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The captured arguments, in schema order, with variables in place of tensors."""
        waiting = list(names)
        args = tuple(_replaced(a, waiting) for a in node.args)
        schema = list(operator.call.args)
        ordered = sorted(node.kwargs.items(), key=lambda item: schema.index(item[0]))
        kwargs = {k: _replaced(v, waiting) for k, v in ordered}
        assert not waiting, (node, names)
        return args, kwargs

    def _lowered_arguments(
        self, operator: Operator, chosen: OperatorStrategy,
        args: tuple[Any, ...], kwargs: Mapping[str, Any],
    ) -> tuple[Any, ...]:  # fmt: skip
        """The arguments of the function that replaces an operator; missing ones have defaults."""
        assert chosen.lowered is not None
        schema = operator.call.args
        values = {**schema, **dict(zip(schema, args, strict=False)), **kwargs}
        values[GROUP] = Ref(group_name(self.cost.mesh.names, chosen.lowered_axes))
        values[FOLDED] = chosen.lowered_axes == (self.folded,)
        return tuple(values[name] for name in chosen.lowered.arguments)

    def _receive(self, value: str) -> Boundary:
        spec = self.strategy.received.get(value)
        if spec is None:  # it crosses only for the user's outputs, so no plan gives its spec
            spec = boundary_specs(self.types[value], self.sizes, "received")[0]
        name = self._unique(value)
        self.produced[value], self.variables[value, spec] = spec, name
        return Boundary(self._local(name, value, spec), value, self.program.value_key(value))

    def _send(self, value: str) -> Boundary:
        spec = self.strategy.sent.get(value)
        if spec is None:
            spec = boundary_specs(self.types[value], self.sizes, "sent")[0]
        name = self._resharded(value, spec)
        return Boundary(self._local(name, value, spec), value, self.program.value_key(value))

    def _loss(self) -> str:
        loss = self.program.loss
        assert loss is not None
        plain = I if self.types[loss].has_grad else R
        goal = Spec.everywhere(plain, self.sizes)
        return self._resharded(loss, goal, phase="loss")

    def _changed(self, buffer: BufferInfo) -> ChangedBuffer:
        """What a buffer holds after the microbatch: replicated, as it is stored."""
        value = buffer.update
        assert value is not None and not self.types[value].has_grad
        whole = Spec.everywhere(R, self.sizes)
        if value in self.produced:
            name = self._resharded(value, whole, "buffer")
        else:
            name = self._deliver(value, whole)
        local = self._local(name, value, whole)
        return ChangedBuffer(buffer.name, buffer.aliases, buffer.persistent, local)

    def _output(self, value: str) -> str:
        """A model output, replicated and detached from autograd."""
        if value not in self.produced:
            return self._deliver(value, Spec.everywhere(R, self.sizes))
        spec = without_gradient(self.produced[value], self.sizes)
        old = self.types[value]
        tensor = replace(old, has_grad=False)
        name = self._unique(f"{identifier(value)}_out")
        self.body.append(
            DetachLine(
                self._placed(name, value, tensor, spec), self.variables[value, self.produced[value]]
            )
        )
        whole = Spec.everywhere(R, self.sizes)
        self.body += self._moves(value, tensor, spec, whole, name, name, "output")
        return name


def join(
    stages: Sequence[PlacedStage], schedule: str | None, with_outputs: bool = False
) -> Pipeline:
    """The pipeline of the lowered stages; without a schedule it runs forward only.

    `with_outputs` also returns the model's outputs.
    """

    def lower_all(may_fold: bool) -> list[StageProgram]:
        return [
            lower(s.analysis, s.strategy, s.cost, with_outputs and k == len(stages) - 1, may_fold)
            for k, s in enumerate(stages)
        ]

    meshes = [s.cost.mesh for s in stages]
    programs = fold_alike(lower_all(True), meshes) or lower_all(False)
    order = forward_only if schedule is None else ORDERS[schedule]
    return Pipeline.of(programs, meshes, order)


def _replaced(value: Any, waiting: list[str]) -> Any:
    """An argument with the waiting variables, in order, in place of nodes."""
    if isinstance(value, torch.fx.Node):
        return Ref(waiting.pop(0))
    if isinstance(value, (list, tuple)):
        return [_replaced(v, waiting) for v in value]
    return DEVICE if isinstance(value, torch.device) else value
