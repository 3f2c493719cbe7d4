"""Captures a model and a batch as a `Program`, in these steps (`capture`):

export       one ATen graph of a fake copy            trace/
functional   no mutation                              buffers.py, inplace.py, view_writes.py
normalise    canonical operators                      normalise.py, rewrites/, builder.py,
                                                      autocast.py
unsort       rows that are sorted by expert            sorted_rows.py
lift         if asked for: everything in float64      lift.py
attention    masks, and heads that queries share      attention/
cut          constants and prologue leave             dependence.py, constants.py, prologue.py
freeze       ordered placeholders, no dead code       `_freeze`; what it holds: python_state/
mixtures     of experts, as one operator each         mixtures.py
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from autopar.capture.accumulate import first_rows, mean_loss, of_microbatch
from autopar.capture.attention import group_queries, range_masks, replace_masks
from autopar.capture.autocast import Autocast
from autopar.capture.buffers import buffer_info, has_buffer, out_of_autograd, return_changes
from autopar.capture.builder import Builder
from autopar.capture.constants import ConstantStore, Leaf, buffer, literal
from autopar.capture.dependence import Cut, Depends, cut, dependences, merge_equal
from autopar.capture.findings import Findings
from autopar.capture.lift import lift
from autopar.capture.mixtures import join_mixtures
from autopar.capture.names import operator_keys, source_line
from autopar.capture.normalise import normalise
from autopar.capture.outputs import Outputs, read_outputs
from autopar.capture.prologue import find_divisors, make_prologue
from autopar.capture.python_state import freeze
from autopar.capture.sorted_rows import unsort_rows
from autopar.capture.trace import (
    REGION,
    LossFn,
    check_leaves,
    checkpointed_regions,
    export_model,
    note_regions,
)
from autopar.errors import CaptureError, NotSupportedError, OptionError
from autopar.precision import WORDS, Precision, lifted_dtype
from autopar.program.graph import (
    Accumulation,
    BufferInfo,
    Frozen,
    InputInfo,
    ParameterInfo,
    Program,
    block_lists,
    flatten_inputs,
)


@dataclass
class Roles:
    """What the placeholders of the new graph stand for.

    leaves            buffers and literals that constants are computed from
    constant_buffers  name of a leaf -> name of the model's buffer that it is
    traced            name of a traced placeholder -> its new node or baked-in value
    """

    parameters: dict[fx.Node, ParameterInfo] = field(default_factory=dict)
    inputs: dict[fx.Node, InputInfo] = field(default_factory=dict)
    buffers: dict[fx.Node, BufferInfo] = field(default_factory=dict)
    leaves: dict[fx.Node, Leaf] = field(default_factory=dict)
    constant_buffers: dict[str, str] = field(default_factory=dict)
    traced: dict[str, Any] = field(default_factory=dict)


_CAPTURING = threading.RLock()
P = ParamSpec("P")
T = TypeVar("T")


def _one_at_a_time(function: Callable[P, T]) -> Callable[P, T]:
    """Calls from several threads of a process run one after another: a trace patches torch."""

    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        with _CAPTURING:
            return function(*args, **kwargs)

    return locked


@_one_at_a_time
def capture(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    *,
    training: bool = True,
    precision: Precision | str = "model",
    loss_fn: LossFn | None = None,
    live_buffers: Collection[str] = (),
    accumulation: Accumulation | None = None,
    modes: Mapping[str, bool] | None = None,
) -> Program:
    """Trace `model` on one global batch; the model is left untouched and no weight is copied.

    example_inputs    keyword inputs (dict) or positional ones (tuple); tensors may be real, meta
                      or fake, other values are baked in
    training          True keeps the model's mode and needs a loss; False captures eval mode
    precision         the dtypes of the graph (`autopar/precision.py`), or the option's word
    loss_fn           (outputs, batch) -> loss; None if the model returns its loss
    live_buffers      buffers that another program of the model changes; they are inputs, as are
                      buffers that the forward pass changes; other buffers are constants
    accumulation      if given, only its first microbatch is captured
    modes             training mode of each module, by path; None: those that `model` has now

    Raises `CaptureError` (not traceable, Python state changes, or no loss), `NotSupportedError` (a
    visible mutation of anything but a buffer, labels that depend on parameters, a hook that would
    never run), `OptionError`.
    """
    if isinstance(precision, str):
        if precision not in WORDS:
            raise OptionError(f"precision={precision!r} cannot be captured; it is one of {WORDS}")
        precision = Precision.of(precision)
    check_leaves(example_inputs)
    rows = first_rows(example_inputs, accumulation) if accumulation else example_inputs
    findings = Findings()
    try:
        exported, graph, reads, known, _ = export_model(
            model, rows, findings, training=training, loss_fn=loss_fn, modes=modes,
            precision=precision,
        )  # fmt: skip
    except CaptureError as error:
        if accumulation is None:
            raise
        raise of_microbatch(error, example_inputs, accumulation) from error
    prefix = "model." if loss_fn is not None else ""
    changed = return_changes(model, exported, graph, prefix)
    _check_known(known, exported, changed, prefix, live_buffers)
    values = [n.meta.get("val") for n in exported.graph.nodes if n.op == "placeholder"]
    mode = detect_fake_mode(values)
    assert mode is not None, "an exported graph has fake values"
    builder = Builder(mode, findings=findings)
    by_name = _add_parameters(model, builder, roles := Roles(), precision)
    _add_placeholders(model, exported, builder, roles, by_name, prefix, {*changed}, live_buffers)
    autocast = Autocast(precision)
    results = unsort_rows(builder, normalise(graph, builder, roles.traced, autocast))
    n_results = len(results) - len(changed)
    outputs = read_outputs(
        model, results[:n_results], exported.call_spec.out_spec, builder.has_grad, training,
        loss_fn is not None,
    )  # fmt: skip
    if accumulation:
        outputs = mean_loss(builder, outputs, accumulation.n)
    _check_changes(exported, dict(zip(changed, results[n_results:], strict=True)))
    updates = {
        roles.traced[name]: out_of_autograd(builder, value)
        for name, value in zip(changed, results[n_results:], strict=True)
    }
    autocast.use_in_half(roles.parameters)
    if precision.is_lifted:
        outputs, updates = _lifted(builder, roles, outputs, updates, precision.keeps_casts)
    program, read = _freeze(model, builder, roles, outputs, updates, training, prefix)
    regions = checkpointed_regions(program.operators, program.has_grad) if training else ()
    note_regions(findings, regions, program.sources)
    if modes is None:
        modes = {path: module.training for path, module in model.named_modules()}
    held = tuple(buffer for leaf, buffer in roles.constant_buffers.items() if leaf in read)
    held = (*held, *(buffer for buffer in known if buffer not in held))
    frozen = freeze(model, loss_fn, reads, modes if training else {}, held, findings)
    _refuse_learning(frozen, exported)
    return replace(
        program, accumulation=accumulation, checkpointed=regions, audit=findings.audit(),
        frozen=frozen,
    )  # fmt: skip


def _lifted(
    builder: Builder,
    roles: Roles,
    outputs: Outputs,
    updates: Mapping[fx.Node, fx.Node],
    keeps_casts: bool,
) -> tuple[Outputs, dict[fx.Node, fx.Node]]:
    """Lift the graph, and what is known about it, to float64."""
    replaced = lift(builder.graph, builder.mode, builder.has_grad, keeps_casts)

    def now(node: fx.Node) -> fx.Node:
        while node in replaced:
            node = replaced[node]
        return node

    every: tuple[dict[fx.Node, Any], ...] = (roles.parameters, roles.inputs, roles.buffers)
    for infos in every:
        for node, info in infos.items():
            infos[node] = replace(info, dtype=lifted_dtype(info.dtype))
    widened = {make: _widened(make) for make in builder.constants.values()}  # shared ones stay so
    builder.constants = {n: widened[make] for n, make in builder.constants.items()}
    builder.divisors = {now(node) for node in builder.divisors}
    loss = None if outputs.loss is None else now(outputs.loss)
    lifted = replace(outputs, loss=loss, tensors=tuple(map(now, outputs.tensors)))
    return lifted, {buffer: now(value) for buffer, value in updates.items()}


def _widened(make: Leaf) -> Leaf:
    def made() -> torch.Tensor:
        value = make()
        return value.to(lifted_dtype(value.dtype))

    return made


def _check_known(
    known: Collection[str], exported: ExportedProgram, changed: Collection[str], prefix: str,
    live_buffers: Collection[str],
) -> None:  # fmt: skip
    """Refuse buffers whose values the trace read, and that steps change."""
    specs = exported.graph_signature.input_specs
    names = {str(s.target).removeprefix(prefix) for s in specs if s.arg.name in changed}
    for name in sorted({*known} & {*names, *live_buffers}):
        raise NotSupportedError(
            f"buffer `{name}` is read as a Python value in forward, and changes in a step",
            hint="run one batch first, if it changes only then; else use torch.where",
        )


def _check_changes(exported: ExportedProgram, changes: Mapping[str, fx.Node]) -> None:
    """Refuse buffers that change in a checkpointed region: torch changes them twice a step."""
    targets = {s.arg.name: s.target for s in exported.graph_signature.input_specs}
    for name, value in changes.items():
        if REGION in value.meta:
            raise NotSupportedError(
                f"buffer `{targets[name]}` changes inside torch.utils.checkpoint, which runs twice "
                "in a step of one process",
                where=source_line(value),
                hint="take torch.utils.checkpoint away, and give recompute='full' to autopar",
            )


def _add_placeholders(
    model: nn.Module,
    exported: ExportedProgram,
    builder: Builder,
    roles: Roles,
    by_name: Mapping[str, fx.Node],
    prefix: str,
    changed: Collection[str],
    live_buffers: Collection[str],
) -> None:
    """Add all placeholders to `builder` but parameters, which are there already."""
    specs = exported.graph_signature.input_specs
    traced = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    inputs = []
    for spec in specs:
        name, target = spec.arg.name, str(spec.target or "").removeprefix(prefix)
        value = traced[name].meta.get("val")
        if spec.kind is InputKind.PARAMETER:
            roles.traced[name] = by_name[target]
        elif spec.kind is InputKind.USER_INPUT:
            inputs.append(name)
        elif spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            node = builder.placeholder(name, value)
            roles.traced[name] = node
            is_buffer = spec.kind is InputKind.BUFFER and has_buffer(model, target)
            if is_buffer:
                info = buffer_info(model, target, node.meta["val"])
                if name in changed or info.name in live_buffers:
                    roles.buffers[node] = info
                    continue
                roles.constant_buffers[node.name] = target
            held = None if is_buffer else _held_tensor(model, exported, str(spec.target))
            roles.leaves[node] = (
                buffer(model, target) if held is None else literal(held, f"constant `{target}`")
            )
        else:
            raise _no_tensor(exported.constants.get(str(spec.target)), target)
    _add_inputs(exported, builder, roles, inputs, traced)


def _no_tensor(held: object, target: str) -> NotSupportedError:
    if isinstance(held, torch.Generator):
        return NotSupportedError(
            "forward draws from a torch.Generator, which the graph cannot hold",
            hint="leave generator= out: pm.step draws from pm.stream, new numbers in each step, "
            "the same for every plan",
        )
    kind = "" if held is None else f", a {type(held).__name__}"
    return NotSupportedError(
        f"the model holds an object that is not a tensor: `{target}`{kind}",
        hint="compute with it before the step, and pass tensors",
    )


def _held_tensor(model: nn.Module, exported: ExportedProgram, name: str) -> torch.Tensor:
    held = exported.constants.get(name)
    if held is None:
        held = exported.state_dict[name]
    assert isinstance(held, torch.Tensor), name
    if isinstance(held, FakeTensor):
        raise CaptureError(
            f"a parameter or buffer of shape {tuple(held.shape)} is read through a plain container "
            "of the model, or as `.data`, where the trace would keep its value, and give it no "
            "gradient",
            hint="read it as an attribute (`self.weight`), or from an nn.ParameterDict or "
            "nn.ParameterList; `p.detach()` in place of `p.data`, and updates of parameters after "
            "the step",
        )
    # Parameters are lifted without gradient, so only their memory tells.
    memory = 0 if held.is_meta else held.data_ptr()
    names = [n for n, p in model.named_parameters() if not p.is_meta and p.data_ptr() == memory]
    if held.requires_grad or (names and memory):
        what = f"parameter `{names[0]}`" if names else f"a tensor of shape {tuple(held.shape)}"
        raise CaptureError(
            f"{what} is read from outside of the model: the trace would keep its value, and give "
            "it no gradient",
            hint="read parameters through `self` in forward (return what the loss needs of them), "
            "or detach() a tensor that does not learn",
        )
    return held


def _refuse_learning(frozen: Frozen, exported: ExportedProgram) -> None:
    """Raise `CaptureError` for a constant of the graph that learns in one process: a parameter
    of the loss, or of a module beside the model.
    """
    lifted = [t for t in exported.constants.values() if type(t) is torch.Tensor and not t.is_meta]
    memory = {t.data_ptr() for t in lifted} - {0}
    for name, value in frozen.values.items():
        tensor = getattr(value, "tensor", None)
        if tensor is not None and tensor.requires_grad and tensor.data_ptr() in memory:
            raise CaptureError(
                f"{name} requires grad and is no parameter of the model: the trace would keep its "
                "value, and give it no gradient",
                hint="make its module a part of the model, whose forward then returns the loss; or "
                "requires_grad_(False) for what does not learn",
            )


def _add_parameters(
    model: nn.Module, builder: Builder, roles: Roles, precision: Precision
) -> dict[str, fx.Node]:
    """Placeholders of all parameters, once each in the model's order; by every name."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    by_name: dict[str, fx.Node] = {}
    for name, parameter in model.named_parameters():
        node = builder.placeholder(
            "p_" + name.replace(".", "_"), parameter, parameter.requires_grad,
            precision.used(parameter.dtype),
        )  # fmt: skip
        first, *aliases = names[id(parameter)]
        roles.parameters[node] = ParameterInfo(
            first,
            tuple(aliases),
            tuple(parameter.shape),
            precision.stored(parameter.dtype),
            parameter.requires_grad,
            reduce_dtype=precision.reduced(parameter.dtype),
        )
        by_name |= dict.fromkeys((first, *aliases), node)
    return by_name


def _add_inputs(
    exported: ExportedProgram,
    builder: Builder,
    roles: Roles,
    names: list[str],
    traced: Mapping[str, fx.Node],
) -> None:
    """Add placeholders for input tensors; other inputs are baked in."""
    args, kwargs = pytree.tree_unflatten(names, exported.call_spec.in_spec)
    for path, name in flatten_inputs(kwargs or args).items():
        value = traced[name].meta.get("val")
        if not isinstance(value, torch.Tensor):
            roles.traced[name] = value
            continue
        text = path.replace(".", "_")
        node = builder.placeholder(text if text.isidentifier() else f"input_{text}", value)
        dtype = node.meta["val"].dtype
        roles.inputs[node] = InputInfo(node.name, path, tuple(value.shape), dtype)
        roles.traced[name] = node


def _freeze(
    model: nn.Module,
    builder: Builder,
    roles: Roles,
    outputs: Outputs,
    updates: Mapping[fx.Node, fx.Node],
    training: bool,
    prefix: str,
) -> tuple[Program, set[str]]:
    """The program, and the names of the leaves whose values it holds."""
    seeds = [] if builder.random_seed is None else [builder.random_seed]
    leaves = (
        dict.fromkeys((*roles.parameters, *roles.buffers, *seeds), Depends.ANY)
        | dict.fromkeys(roles.inputs, Depends.INPUT)
        | dict.fromkeys((*roles.leaves, *builder.constants), Depends.CONSTANT)
    )
    depends = dependences(builder.graph, leaves)
    merge_equal(builder.graph, depends)
    known = {**roles.leaves, **builder.constants}
    read_in_masks = replace_masks(builder.graph, depends, known, builder.findings)
    range_masks(builder, depends, known)
    group_queries(builder)
    depends = dependences(builder.graph, leaves)
    divisors = find_divisors(builder.graph, builder.divisors, depends, set(roles.leaves))
    results = (*outputs.all, *(updates[n] for n in roles.buffers if n in updates))
    parts = cut(builder.graph, results, depends, divisors)
    seeds = [node for node in seeds if node in parts.live]
    placeholders = [
        *roles.parameters, *roles.inputs, *roles.buffers, *parts.constants, *parts.divisors, *seeds
    ]  # fmt: skip
    graph, env = _assemble(builder.graph, placeholders, parts, results)
    join_mixtures(graph)
    computed = tuple(n for n in parts.constants if n not in builder.constants)
    store = ConstantStore(computed, {n.name: leaf for n, leaf in roles.leaves.items()})
    constants = store.callables() | {n.name: f for n, f in builder.constants.items()}
    operators = [n for n in graph.nodes if n.op == "call_function"]
    names = {n.name for n in graph.nodes}
    sources = {n.name: line for n in operators if (line := source_line(n)) is not None}
    program = Program(
        graph=graph,
        parameters={env[n].name: info for n, info in roles.parameters.items()},
        buffers={
            env[n].name: replace(info, update=env[updates[n]].name if n in updates else None)
            for n, info in roles.buffers.items()
        },
        inputs={env[n].name: info for n, info in roles.inputs.items()},
        constants={env[n].name: constants[n.name] for n in parts.constants},
        prologue=make_prologue(parts.divisors),
        seed=seeds[0].name if seeds else None,
        loss=env[outputs.loss].name if outputs.loss is not None else None,
        outputs=tuple(env[n].name for n in outputs.tensors),
        out_spec=outputs.spec,
        has_grad=frozenset({env[n].name for n in builder.has_grad if n in env} & names),
        keys=operator_keys(operators, prefix),
        sources=sources,
        training=training,
        model_name=type(model).__name__,
        static_outputs=outputs.static,
        block_lists=block_lists({p.name: p.shape for p in roles.parameters.values()}),
        modules=frozenset(name for name, _ in model.named_modules(remove_duplicate=False) if name),
    )
    held = {*store.leaves, *(node.name for node in read_in_masks)}
    return program, held


def _assemble(
    draft: fx.Graph, placeholders: Sequence[fx.Node], parts: Cut, results: Sequence[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A new graph of `placeholders` and the live operators; node names are kept."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in placeholders:
        env[node] = graph.create_node("placeholder", node.name, name=node.name)
        env[node].meta = dict(node.meta)
    for node in draft.nodes:
        if node in parts.live and node not in env:
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[n] for n in results))
    graph.lint()
    assert all(env[n].name == n.name for n in env), "assembling must keep node names"
    return graph, env
