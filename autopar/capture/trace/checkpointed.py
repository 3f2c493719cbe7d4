"""Marks what runs inside `torch.utils.checkpoint.checkpoint(...)`, so that backward runs it again.

A trace through torch's own implementation would lose the region without a word, and one of the
reentrant kind would lose gradients. So the function runs as if there were no checkpoint, and the
nodes that it adds to the graph are marked (`REGION`). Numbers are the same either way: random bits
are a hash of positions. The planner reads the regions as `Program.checkpointed`.

    use_reentrant=False   the function runs as it is
    use_reentrant=True    the same; but if no tensor among its arguments requires grad, torch gives
                          no gradient to anything inside, so it runs without gradients
    context_fn            only `create_selective_checkpoint_contexts`: the planner's own choice of
                          results that are kept stands for the user's
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.capture.findings import Findings
from autopar.capture.trace.exchange import Exchange
from autopar.errors import NotSupportedError
from autopar.program.graph import Checkpointed

# Meta key: the outermost region that a node is of.
REGION = "autopar_region"
_numbers = itertools.count()


@dataclass(frozen=True)
class Region:
    """One call of `checkpoint`; `is_selective`: with a policy of what is kept."""

    number: int
    is_selective: bool


def regions_marked() -> AbstractContextManager[None]:
    """Nodes of checkpointed calls are marked, in this thread."""
    return _exchange.on()


def reentrant(function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """What `CheckpointFunction.apply` does in a trace."""
    tensors = (value for value in inputs if isinstance(value, torch.Tensor))
    if not any(tensor.requires_grad for tensor in tensors):
        with torch.no_grad():
            return function(*inputs)
    with _marked(is_selective=False):
        return function(*inputs)


@contextmanager
def _marked(is_selective: bool) -> Iterator[None]:
    """Mark the nodes that are added to the graph of the trace."""
    mode = get_proxy_mode()
    assert mode is not None, "torch.export traces with proxies"
    graph = mode.tracer.graph
    last = next(iter(reversed(graph.nodes)), None)
    yield
    region = Region(next(_numbers), is_selective)
    for node in reversed(graph.nodes):
        if node is last:
            break
        node.meta[REGION] = region


def another_region(region: Region) -> Region:
    """A call like that of `region`, of a copy of its operators."""
    return Region(next(_numbers), region.is_selective)


def generate(
    function: Any,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Any] = torch_checkpoint.noop_context_fn,
    *args: Any,
    **kwargs: Any,
) -> Generator[None, None, None]:
    """What torch's generator of the same arguments does in a trace."""
    contexts = context_fn()
    is_selective = any(not isinstance(c, nullcontext) for c in contexts)
    if is_selective and not isinstance(contexts[0], torch_checkpoint._CachingTorchDispatchMode):
        raise NotSupportedError(
            "context_fn of torch.utils.checkpoint gives contexts that autopar does not know: "
            f"{', '.join(type(c).__name__ for c in contexts)}",
            hint="use create_selective_checkpoint_contexts, or enter the context inside the "
            "function that is checkpointed",
        )
    with _marked(is_selective):
        yield


_exchange = Exchange(torch_checkpoint._checkpoint_without_reentrant_generator, generate)


def checkpointed_regions(
    operators: Iterable[fx.Node], has_grad: Iterable[str]
) -> tuple[Checkpointed, ...]:
    """The regions of a graph that carry gradient, in order."""
    found: dict[Region, list[str]] = {}
    for node in operators:
        if REGION in node.meta:
            found.setdefault(node.meta[REGION], []).append(node.name)
    carrying = set(has_grad)
    return tuple(
        Checkpointed(tuple(names), region.is_selective)
        for region, names in found.items()
        if not carrying.isdisjoint(names)
    )


def note_regions(
    findings: Findings, regions: Sequence[Checkpointed], sources: Mapping[str, str]
) -> None:
    """Put the regions into the audit."""
    for is_selective in (False, True):
        first = [r.operators[0] for r in regions if r.is_selective is is_selective]
        if not first:
            continue
        what = f"{len(first)} checkpointed region{'s' if len(first) > 1 else ''}"
        why = "runs again in backward, unless the option recompute says otherwise"
        if is_selective:
            why = "recompute='selective' stands for the policy: it keeps the results of matmuls"
        findings.add("replaced", what, why, sources.get(first[0]))
