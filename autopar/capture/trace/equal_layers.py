"""Traces one of equal layers; in the place of others the graph has a call that stands for them.

A *layer* is a child of a list of modules some of whose children are equal (`block_lists`). The
trace of a layer that was traced is between two marks (`BEGINS`, `ENDS`). A later layer becomes one
node (`STANDS_FOR`), which `layer_copies.py` replaces by copies of these operators, if

    modules     it has the same modules, parameters and buffers, in shape, dtype and requires_grad
    attributes  what the traced layer read of its modules is equal (`Alike`), and unchanged since
    arguments   are of one structure; tensors alike in shape, stride, dtype and requires_grad, other
                leaves equal scalars
    state       nothing that the model's code reads has changed since the trace began, no module has
                been written to, and torch's modes are the same

and if the traced layer read no other modules, noted no findings, and returned new tensors. The last
layer is always traced: `layer_copies.py` compares it with the copy that would stand for it. So what
depends on a layer's place, by ways that Python does not show, is noticed.
"""

from __future__ import annotations

import contextvars
import functools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autopar.capture.findings import Findings
from autopar.capture.python_state import (
    Alike,
    Recorder,
    Scalar,
    Snapshot,
    Window,
    recorder_of,
    same,
    value_of,
)
from autopar.program.graph import block_lists

_LIBRARY = torch.library.Library("autopar_layers", "DEF")
_LIBRARY.define("begins(int number, Tensor[] given) -> ()")
_LIBRARY.define("ends(int number, Tensor[] results) -> ()")
_LIBRARY.define("stands_for(int number, Tensor[] given) -> Tensor[]")
BEGINS = torch.ops.autopar_layers.begins.default
ENDS = torch.ops.autopar_layers.ends.default
STANDS_FOR = torch.ops.autopar_layers.stands_for.default
_LEAST = 4  # layers of a list: of fewer, nothing would be left out
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_CALLED = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward"})


@dataclass
class Layer:
    """A layer of the traced copy.

    kind     the modules, parameters and buffers, equal for layers that may be equal
    tensors  the names of its parameters and buffers in the model, in the order of `kind`
    shared   those that other parts of the model have, too, under all names
    """

    path: str
    module: nn.Module
    modules: tuple[nn.Module, ...]
    kind: object
    tensors: tuple[str, ...]
    shared: tuple[str, ...]
    is_last: bool = False
    is_called: bool = False


@dataclass
class Example:
    """A layer that was traced, with what it was given, read and returned."""

    number: int
    layer: Layer
    given: _Given
    modes: object
    reads: Sequence[tuple[int, str]]  # number of the module, attribute
    calls: Mapping[str, int]  # path within the layer -> how often the module was called
    results: Sequence[Any]
    result_spec: pytree.TreeSpec


@dataclass(frozen=True)
class Copy:
    """A layer that an example stands for; `is_traced` to compare it."""

    layer: Layer
    example: int
    is_traced: bool = False


@dataclass
class _Given:
    """The arguments of a call: its tensors, each once, and a word for each leaf."""

    spec: pytree.TreeSpec
    leaves: Sequence[Any]
    tensors: Sequence[Tensor]
    words: Sequence[object]

    @staticmethod
    def of(args: Any, kwargs: Any) -> _Given | None:
        """None if there are leaves that are neither tensors nor scalars."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        numbers: dict[int, int] = {}
        tensors, words = [], list[object]()
        for leaf in leaves:
            if type(leaf) is FakeTensor:
                if id(leaf) not in numbers:
                    numbers[id(leaf)] = len(numbers)
                    tensors.append(leaf)
                words.append((numbers[id(leaf)], _meta(leaf)))
            elif isinstance(leaf, Scalar):
                words.append(leaf)
            else:
                return None
        return _Given(spec, leaves, tensors, words)

    def is_like(self, other: _Given) -> bool:
        return self.spec == other.spec and all(map(same, self.words, other.words))

    def is_still(self, args: Any, kwargs: Any) -> bool:
        """Are the same leaves in the same places?"""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return spec == self.spec and all(map(_is_same_leaf, leaves, self.leaves))


def _is_same_leaf(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, Scalar) and same(one, other))


def _meta(tensor: Tensor) -> tuple[object, ...]:
    return (
        tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), tensor.layout,
        tensor.requires_grad, tensor.storage_offset(), frozenset(vars(tensor)),
    )  # fmt: skip


@dataclass
class EqualLayers:
    """The layers of `twin` in one trace.

    prefix      what names of its modules have before them in what is traced
    state       what the model's code reads beside modules, as it was before the trace
    examples    of each number of a mark
    copies      of each number of a node that stands for a layer, or of the mark of a compared one
    is_doubtful the last layer did something that its example did not
    """

    twin: nn.Module
    prefix: str
    state: Snapshot
    findings: Findings
    examples: dict[int, Example] = field(default_factory=dict)
    copies: dict[int, Copy] = field(default_factory=dict)
    is_doubtful: bool = False
    _n_marks: int = 0
    _is_inside: bool = False

    @property
    def n_copies(self) -> int:
        """How many layers are not traced."""
        return sum(not copy.is_traced for copy in self.copies.values())

    @contextmanager
    def called(self) -> Iterator[None]:
        """Calls of layers pass through here."""
        layers = layers_of(self.twin)
        for layer in layers:
            vars(layer.module)["forward"] = self._instead(layer)
        try:
            yield
        finally:
            for layer in layers:
                del vars(layer.module)["forward"]

    def _instead(self, layer: Layer) -> Callable[..., Any]:
        original = layer.module.forward

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            mode, recorder = get_proxy_mode(), recorder_of(layer.module)
            is_first = not layer.is_called
            layer.is_called = True
            if mode is None or recorder is None or self._is_inside or not is_first:
                return original(*args, **kwargs)
            given = _Given.of(args, kwargs)
            if given is None or not all(_is_traced(t, mode.tracer) for t in given.tensors):
                return original(*args, **kwargs)
            modes = _modes()
            with torch._C.DisableTorchFunction():  # the trace has modes that see each attribute
                example = self._example_of(layer, given, modes, recorder)
            if example is not None and not layer.is_last:
                return self._stand_in(layer, example, given, mode.tracer)
            return self._traced(
                layer, functools.partial(original, *args, **kwargs), given, (args, kwargs),
                example, recorder, mode.tracer,
            )  # fmt: skip

        return called

    def _example_of(
        self, layer: Layer, given: _Given, modes: object, recorder: Recorder
    ) -> Example | None:
        """The example that may stand for a call of `layer`."""
        if recorder.has_written:
            return None
        for example in self.examples.values():
            if (
                example.layer.kind == layer.kind
                and example.modes == modes
                and example.given.is_like(given)
                and _reads_equal(example, layer, recorder)
                and self.state.is_unchanged()
            ):
                return example
        return None

    def _stand_in(self, layer: Layer, example: Example, given: _Given, tracer: Any) -> Any:
        """One node, with results like those of the example."""
        number = self._next_number()
        self.copies[number] = Copy(layer, example.number)
        results = list(example.results)
        tensors = [leaf for leaf in results if isinstance(leaf, Tensor)]
        made = _like(tensors)
        proxy = _mark(tracer, STANDS_FOR, number, given.tensors)
        track_tensor_tree(made, proxy, constant=None, tracer=tracer)
        for place, name in example.reads:  # as if it had run
            getattr(layer.modules[place], name, None)
        for path, n in example.calls.items():
            tracer.num_calls[f"{tracer.path_of_module(layer.module)}.{path}"] = n
        remaining = iter(made)
        leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in results]
        return pytree.tree_unflatten(leaves, example.result_spec)

    def _traced(
        self, layer: Layer, run: Callable[[], Any], given: _Given, arguments: Any,
        example: Example | None, recorder: Recorder, tracer: Any,
    ) -> Any:  # fmt: skip
        """Trace `layer` between marks, and keep it as an example if others may be like it."""
        number, before = self._next_number(), self._surroundings(layer)
        _mark(tracer, BEGINS, number, given.tensors)
        recorder.window = window = Window()
        self._is_inside = True
        try:
            out = run()
        finally:
            self._is_inside, recorder.window = False, None
        places = {id(module): place for place, module in enumerate(layer.modules)}
        leaves, spec = pytree.tree_flatten(out)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        is_known = (
            not window.is_whole
            and not recorder.has_written
            and all(id(module) in places for module, _ in window.reads)
            and given.is_still(*arguments)
            and self._surroundings(layer) == before
            and all(isinstance(leaf, (Tensor, Scalar)) for leaf in leaves)
            and all(_is_traced(tensor, tracer) for tensor in tensors)
            and _are_new(tensors, given.tensors)
        )
        if not is_known:
            self.is_doubtful |= example is not None
            return out
        _mark(tracer, ENDS, number, tensors)
        reads = tuple((places[id(module)], name) for module, name in window.reads)
        within = f"{tracer.path_of_module(layer.module)}."
        calls = {
            path.removeprefix(within): n
            for path, n in tracer.num_calls.items()
            if path.startswith(within)
        }
        self.examples[number] = Example(
            number, layer, given, before[0], reads, calls, leaves, spec
        )  # fmt: skip
        if example is not None:
            self.copies[number] = Copy(layer, example.number, is_traced=True)
        return out

    def _surroundings(self, layer: Layer) -> tuple[object, ...]:
        """What a layer must leave as it is, the modes first."""
        modes, notes = _modes(), self.findings.audit()
        buffers = tuple(id(b) for m in layer.modules for b in vars(m)["_buffers"].values())
        with torch._C.DisableTorchFunction():
            return modes, notes, buffers, random.getstate(), self.state.is_unchanged()

    def _next_number(self) -> int:
        self._n_marks += 1
        return self._n_marks


def _reads_equal(example: Example, layer: Layer, recorder: Recorder) -> bool:
    pairs = zip(example.layer.modules, layer.modules, strict=True)
    alike = Alike({id(one): other for one, other in pairs})
    for place, name in example.reads:
        one, other = example.layer.modules[place], layer.modules[place]
        if not recorder.is_unchanged(one, name):
            return False
        if not alike(value_of(one, name), value_of(other, name)):
            return False
    return True


def _modes() -> tuple[object, ...]:
    """Settings of torch and of the context that operators depend on."""
    context = contextvars.copy_context()
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.default_generator.initial_seed(),
        tuple(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ),
        tuple(map(id, _get_current_function_mode_stack())),
        tuple(map(id, _get_current_dispatch_mode_stack())),
        tuple((variable, id(context[variable])) for variable in context),
    )  # fmt: skip


def _is_traced(tensor: Tensor, tracer: Any) -> bool:
    return type(tensor) is FakeTensor and get_proxy_slot(tensor, tracer, None) is not None


def _are_new(tensors: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """Does each have memory of its own, all of it, and no name beside?"""
    memories = [t.untyped_storage()._cdata for t in (*given, *tensors)]
    return (
        len({*memories[len(given) :]}) == len(tensors)
        and not ({*memories[: len(given)]} & {*memories[len(given) :]})
        and all(
            t.storage_offset() == 0
            and is_non_overlapping_and_dense_or_false(t)
            and t.untyped_storage().nbytes() == t.numel() * t.element_size()
            for t in tensors
        )
    )


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """New fake tensors of the same kinds, results of an operator where gradients pass."""
    made = []
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction(), torch.enable_grad():
        for like in tensors:
            assert isinstance(like, FakeTensor)
            with like.fake_mode:
                new = torch.empty_strided(
                    tuple(like.shape), like.stride(), dtype=like.dtype, device=like.device
                )
                made.append(new.requires_grad_().clone() if like.requires_grad else new)
    return made


def _mark(tracer: Any, target: Any, number: int, tensors: Sequence[Tensor]) -> Any:
    """A node of the trace."""
    proxies = [get_proxy_slot(t, tracer).proxy for t in tensors]
    proxy = tracer.create_proxy("call_function", target, (number, proxies), {})
    proxy.node.meta["val"] = None
    return proxy


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of a model that may be equal to others of their list; none if modules are shared:
    these have several paths."""
    named = dict(model.named_modules())
    if len([*model.named_modules(remove_duplicate=False)]) > len(named):
        return []
    names = defaultdict[int, list[str]](list)
    for named_tensors in (model.named_parameters, model.named_buffers):
        for name, tensor in named_tensors(remove_duplicate=False):
            names[id(tensor)].append(name)
    lists = block_lists({name: tuple(p.shape) for name, p in model.named_parameters()})
    outermost = [p for p in lists if not any(p.startswith(f"{q}.") for q in lists)]
    found = []
    for path in outermost:
        groups: dict[object, list[Layer]] = defaultdict(list)
        for name, child in named[path].named_children():
            layer = _layer(f"{path}.{name}".removeprefix("."), child, names)
            if layer is not None:
                groups[layer.kind].append(layer)
        for group in groups.values():
            if len(group) >= _LEAST:
                group[-1].is_last = True
                found += group
    return found


def _layer(path: str, module: nn.Module, names: Mapping[int, Sequence[str]]) -> Layer | None:
    """None if a module has hooks, or methods of its own."""
    kind: list[object] = []
    tensors: list[str] = []
    shared: list[str] = []
    modules = dict(module.named_modules())
    for name, part in modules.items():
        held = vars(part)
        has_hooks = part is not module and any(held[hooks] for hooks in _HOOKS)
        if has_hooks or not _CALLED.isdisjoint(held):
            return None
        kind.append((name, type(part), tuple(held["_modules"])))
        for group in ("_parameters", "_buffers"):
            for own, tensor in held[group].items():
                kind.append((group, own))
                if tensor is None:
                    continue
                all_names = names[id(tensor)]
                is_own = all(n.startswith(f"{path}.") for n in all_names)
                (tensors if is_own else shared).extend(all_names)
                within = tuple(n.removeprefix(f"{path}.") for n in all_names)
                kind.append((
                    within if is_own else id(tensor), type(tensor), tuple(tensor.shape),
                    tensor.stride(), tensor.dtype, tensor.requires_grad,
                ))  # fmt: skip
    parts = tuple(modules.values())
    return Layer(path, module, parts, tuple(kind), tuple(tensors), tuple(shared))
