"""Runs a module eagerly with the random numbers that its captured program draws.

Eager torch draws from a generator, a captured program by position (`operators/random.py`). Under
`PositionalRandom` every random function that the module calls is captured on its own, by the steps
that capture the whole model (trace, `functionalise`, `normalise`). The graph that results runs in
its place. Functions are numbered in the order of their calls, as capture numbers them, so equal
calls draw equal numbers.

The state of torch's generator says which call this is, with the function and its arguments: every
replaced call advances it by one draw. If a checkpointed region runs again in backward, it runs on
the state that it started with, so its calls get the numbers they had. A call that draws nothing
leaves the state to the next one.

Some draws cannot be replaced: operators without a rewrite, generators of the user's own, kernels
that draw where torch does not show it. `unpaired` names them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.autocast import Autocast
from autopar.capture.builder import Builder
from autopar.capture.inplace import functionalise
from autopar.capture.normalise import normalise
from autopar.capture.rewrites import RANDOM_REWRITES
from autopar.capture.trace import fake_like, fake_mode
from autopar.errors import NotSupportedError
from autopar.operators import ATTENTION_DROPOUT, DROPOUT, UNIFORM, seed_tensor
from autopar.precision import AS_IT_IS, Precision, no_autocast
from autopar.program.graph import Program

# Functions made of random ones.
COMPOSITES = ("scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu")
NAMES = frozenset(
    name + ending for name in (*(p.__name__ for p in RANDOM_REWRITES), *COMPOSITES)
    for ending in ("", "_")
)  # fmt: skip
# What functions of torch that are written in Python ask first: is there a mode to call instead?
_GUARDS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
UNSEEN = "a change of torch's generator by other means, such as torch.manual_seed"

# The operators that draw by position, and the names of their arguments.
_ARGUMENTS: Mapping[Any, Sequence[str]] = {
    target: [argument.name for argument in target._schema.arguments]
    for target in (ATTENTION_DROPOUT, DROPOUT, UNIFORM)
}
_START = 0x5EED_0F_A070  # no seed that a user would set

Draw = tuple[str, tuple[int, ...]]


def draws_of(program: Program) -> dict[int, Draw]:
    """Number of a random operator -> its name and the shape it draws, of those in the graph."""
    return _draws(program.graph)


def _draws(graph: fx.Graph) -> dict[int, Draw]:
    found = {}
    for node in graph.nodes:
        if node.target in _ARGUMENTS:
            positions, number = (_argument(node, name) for name in ("positions", "occurrence"))
            shape = tuple(vector.meta["val"].shape[0] for vector in positions)
            found[number] = (str(node.target), shape)
    return found


def _argument(node: fx.Node, name: str) -> Any:
    """An argument of a random operator, by its name."""
    index = _ARGUMENTS[node.target].index(name)
    return node.args[index] if index < len(node.args) else node.kwargs[name]


class PositionalRandom:
    """A context in which random functions draw by position, with `seed`.

        drawn       what was drawn, by number
        unpaired    names of what drew other random numbers; empty if all were replaced

    Backward passes must run inside too, because checkpointed regions run again there. Torch's
    generator on cpu is seeded, and used to number the calls; the caller restores it.
    """

    def __init__(self, seed: int, precision: Precision = AS_IT_IS) -> None:
        self.seed = seed
        self.precision = precision  # under whose autocast, if any, the module runs
        self.drawn: dict[int, Draw] = {}
        self.unpaired: dict[str, None] = {}
        self._calls: dict[tuple[object, ...], _Call] = {}
        self._reached: set[bytes] = set()
        self._n_random = 0
        self._advances = False
        self._modes = (_Functions(self), _Operators(self))

    def __enter__(self) -> PositionalRandom:
        torch.default_generator.manual_seed(_START)
        self._reached.add(_generator_state())
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        self._state()

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a function of torch that may be random; what it draws is by position."""
        key = (self._state(), *_described(function, args, kwargs))
        if key not in self._calls:
            call = _captured(function, args, kwargs, self._n_random, self.precision)
            if call is None or not call.draws:
                return function(*args, **kwargs)
            self._calls[key] = call
            self._n_random = call.n_random
            self.drawn |= call.draws
        result = self._calls[key].run(args, kwargs, self.seed)
        self._advances = True
        torch.rand(())  # so the next call is another one
        self._advances = False
        self._reached.add(_generator_state())
        return result

    def note(self, operator: torch._ops.OpOverload, run: Callable[[], Any]) -> Any:
        """Run an operator that may draw from torch's generator; note it if it does."""
        if self._advances:
            return run()
        before = self._state()
        result = run()
        after = _generator_state()
        if after != before:
            self.unpaired[str(operator)] = None
            self._reached.add(after)
        return result

    def _state(self) -> bytes:
        """The generator's state; notes a state that no draw has led to."""
        state = _generator_state()
        if state not in self._reached:
            self.unpaired[UNSEEN] = None
            self._reached.add(state)
        return state


def _described(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, ...]:
    """A call without the values of its tensors."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return function.__name__, str(spec), *map(_word, leaves)


def _word(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
    return repr(value)


def _generator_state() -> bytes:
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()


class _Functions(TorchFunctionMode):
    """Hands random functions to `PositionalRandom.call`."""

    def __init__(self, draw: PositionalRandom) -> None:
        super().__init__()
        self._draw = draw
        self._running: list[FunctionType] = []

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, FunctionType):
            body = _body(func) if all(map(_is_plain, types)) else None
            # Methods such as `unflatten` end in the C method that has their own name.
            if body is None or func in self._running:
                return func(*args, **kwargs)
            self._running.append(func)
            try:
                with self:
                    return body(*args, **kwargs)
            finally:
                self._running.pop()
        if getattr(func, "__name__", "").split(".")[0] in NAMES:
            return self._draw.call(func, args, kwargs)
        return func(*args, **kwargs)


def _is_plain(kind: type) -> bool:
    own = getattr(kind, "__torch_function__", None)
    return own in (torch._C._disabled_torch_function_impl, Tensor.__torch_function__)


def _body(function: FunctionType) -> FunctionType | None:
    """A function of torch without the check that hands the call to a mode.

    `F.dropout` calls the mode, and the mode calls `F.dropout`. Without the check, its body runs,
    and the mode sees the functions that the body calls. None if the check is written otherwise.
    """
    names = set(_GUARDS) & set(function.__code__.co_names) & function.__globals__.keys()
    if not names:
        return None
    known = function.__globals__ | dict.fromkeys(names, lambda *_: False)
    body = FunctionType(
        function.__code__, known, function.__name__, function.__defaults__, function.__closure__
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


class _Operators(TorchDispatchMode):
    """Watches what operators draw that are not replaced."""

    def __init__(self, draw: PositionalRandom) -> None:
        super().__init__()
        self._draw = draw

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            self._draw.unpaired[f"{func} with a generator of its own"] = None
        return self._draw.note(func, lambda: func(*args, **kwargs))


@dataclass(frozen=True)
class _Call:
    """A captured call.

    graph       of the call's tensors, then constants and the seed
    constants   placeholder -> what computes it
    seed        placeholder of the seed
    written     positions of the tensors that the call changes; their values are the last results
    strides     of the other results as torch makes them, which the module may view; None: no tensor
    """

    graph: fx.Graph
    constants: Mapping[str, Callable[[], Tensor]]
    seed: str | None
    written: tuple[int, ...]
    spec: pytree.TreeSpec
    strides: tuple[tuple[int, ...] | None, ...]
    draws: Mapping[int, Draw]
    n_random: int

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        rest = iter(tensors)
        values = []
        for node in self.graph.find_nodes(op="placeholder"):
            if node.name in self.constants:
                values.append(self.constants[node.name]())
            else:
                values.append(seed_tensor(seed) if node.name == self.seed else next(rest))
        with no_autocast():
            results = fx.Interpreter(nn.Module(), graph=self.graph).run(*values)
        n_results = len(results) - len(self.written)
        for index, value in zip(self.written, results[n_results:], strict=True):
            tensors[index].copy_(value)
        if self.written:  # in-place functions return what they change
            return tensors[self.written[0]]
        # Backward may need what an operator of autopar gave, and the module may write to it.
        own = [
            value if strides is None else _copy(value, strides)
            for value, strides in zip(results[:n_results], self.strides, strict=True)
        ]
        return pytree.tree_unflatten(own, self.spec)


def _copy(value: Tensor, strides: tuple[int, ...]) -> Tensor:
    out = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return out.copy_(value)


def _captured(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    n_random: int,
    precision: Precision,
) -> _Call | None:
    """The call as a graph whose first random number is `n_random`; None if it cannot be one.

    It is made on a thread of its own: the modes and hooks under which the module runs belong to
    the module's thread.
    """
    if any(isinstance(leaf, torch.Generator) for leaf in pytree.tree_leaves((args, kwargs))):
        return None
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(_capture, function, args, kwargs, n_random, precision).result()
        except NotSupportedError:
            return None


def _capture(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    n_random: int,
    precision: Precision,
) -> _Call:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    mode, result_specs = fake_mode(), []
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    fakes = [fake_like(mode, tensor) for tensor in tensors]

    def run(*given: Tensor) -> list[Any]:
        rest = iter(given)
        filled = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        filled_args, filled_kwargs = pytree.tree_unflatten(filled, spec)
        results, result_spec = pytree.tree_flatten(function(*filled_args, **filled_kwargs))
        result_specs.append(result_spec)
        return results

    with mode, torch.no_grad(), precision.autocast():
        graph = make_fx(run, pre_dispatch=True)(*fakes).graph
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    changed = functionalise(graph, {}, names)
    output = graph.output_node()
    results: Any = output.args[0]
    fakes_of = (node.meta["val"] if isinstance(node, fx.Node) else node for node in results)
    strides = tuple(v.stride() if isinstance(v, Tensor) else None for v in fakes_of)
    output.args = ((*results, *changed.values()),)
    builder = Builder(mode, n_random=n_random)
    traced = {
        name: builder.placeholder(name, fake, tensor.requires_grad)
        for name, fake, tensor in zip(names, fakes, tensors, strict=True)
    }
    builder.graph.output(normalise(graph, builder, traced, Autocast(precision)))
    return _Call(
        builder.graph,
        {node.name: compute for node, compute in builder.constants.items()},
        builder.random_seed.name if builder.random_seed is not None else None,
        tuple(names.index(name) for name in changed),
        result_specs[0],
        strides,
        _draws(builder.graph),
        builder.n_random,
    )
