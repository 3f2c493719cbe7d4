"""Traces `torch.vmap`, and `grad`, `vjp` and `jvp` of `torch.func`, as the operators they call.

The trace sees operators above functorch, so it would see neither what a batched operator runs nor
a derivative. Here the transformed function is traced by itself, below functorch and autograd, and
the operators found are called one by one, on the tensors of the outer trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch._functorch.eager_transforms as eager_transforms
import torch._functorch.vmap as functorch_vmap
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.trace.derivatives import check_differentiable, derivatives_unseen
from autopar.capture.trace.exchange import Exchange
from autopar.errors import NotSupportedError


@contextmanager
def transforms_traced() -> Iterator[None]:
    """Calls of transforms become those of the operators that they run, in this thread."""
    with ExitStack() as stack:
        for exchange in _exchanges.values():
            stack.enter_context(exchange.on())
        yield


def transformed(name: str, *args: Any, **kwargs: Any) -> Any:
    """What a function of functorch does in a trace."""
    own = _exchanges[name]
    if get_proxy_mode() is None:
        return own.original(*args, **kwargs)
    if name in ("jacrev", "jacfwd", "hessian"):
        raise NotSupportedError(
            f"torch.func.{name} in forward, which writes into views",
            hint="torch.func.grad, vjp and jvp are traced, as is torch.autograd.grad(..., "
            "create_graph=True): one row at a time",
        )
    if name == "vjp":
        return _vjp(*args, **kwargs)
    return _run(own.original, args, kwargs)


def _vjp(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """`torch.func.vjp`: the values of a function, and a function that pulls gradients back."""
    original = _exchanges["vjp"].original

    def pull(given: Any, values: Any) -> Any:
        return original(func, *values, has_aux=has_aux)[1](*given)

    def pulled(*given: Any, **_: Any) -> Any:
        return _run(pull, (given, primals), {})

    found = func(*primals)
    return (found[0], pulled, found[1]) if has_aux else (found, pulled)


def _run(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with ExitStack() as stack:
        for exchange in _exchanges.values():
            stack.enter_context(exchange.off())
        graph, inputs, spec, rest = _traced(function, args, kwargs)
    return pytree.tree_unflatten(_replayed(graph, inputs, rest), spec)


def _traced(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The graph of a call, its tensors, the structure of its result, and leaves of no tensors."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    found: list[Any] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        own_args, own_kwargs = pytree.tree_unflatten(filled, spec)
        with torch._C.DisableTorchFunction(), _GradientsStayOn(), derivatives_unseen():
            values, structure = pytree.tree_flatten(function(*own_args, **own_kwargs))
        found[:] = [structure, [None if isinstance(v, Tensor) else (v,) for v in values]]
        return [v for v in values if isinstance(v, Tensor)]

    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        graph = make_fx(run)(*inputs)
    return graph, inputs, *found


def _replayed(graph: fx.GraphModule, inputs: list[Tensor], rest: list[Any]) -> list[Any]:
    """Call the operators of `graph`; results that are no tensors are in `rest`."""
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "get_attr":
            env[node] = getattr(graph, str(node.target))
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
            if isinstance(env[node], (tuple, list)):
                read = [env[node][user.args[1]] for user in node.users if user.users]
                check_differentiable(node.target, read)
        elif node.op == "output":
            tensors = iter(fx.node.map_arg(node.args[0], env.__getitem__))
            return [next(tensors) if value is None else value[0] for value in rest]
    raise AssertionError("a graph without output")


class _GradientsStayOn(TorchDispatchMode):
    """Refuses operators that run with gradients off, which the graph would not show."""

    def __init__(self) -> None:
        super().__init__()
        self._outer = torch.is_grad_enabled()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._outer and not torch.is_grad_enabled():
            raise NotSupportedError(
                f"`{func}` under torch.no_grad() inside of torch.vmap or torch.func",
                hint="detach() what shall have no gradient",
            )
        return func(*args, **(kwargs or {}))


_exchanges = {
    function.__name__: Exchange(function, partial(transformed, function.__name__))
    for function in (
        eager_transforms.hessian,
        eager_transforms.jacfwd,
        eager_transforms.jacrev,
        eager_transforms.vjp,
        functorch_vmap.vmap_impl,
        eager_transforms.grad_and_value_impl,
        eager_transforms._jvp_with_argnums,
    )
}
