"""The casts that `torch.autocast` makes inside of operators, as operators of the graph.

A trace under autocast has the right dtypes, but no casts: they are made between an operator's call
and its kernel, by a list of torch's (`matmul` in bfloat16, `mse_loss` in float32). Here each such
operator runs on fake tensors under autocast, and the casts of its operands are written down.

As in one process, a parameter is cast once a forward pass, and a value that three operators read is
cast three times: so gradients are summed in the dtypes in which autocast sums them. A parameter
that only casts to one dtype read is used in that dtype (`use_in_half`), as in mixed precision.

The lists are those of autocast on CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.builder import Builder
from autopar.errors import NotSupportedError
from autopar.operators import function_of
from autopar.precision import Precision
from autopar.program.graph import ParameterInfo

aten = torch.ops.aten
# Kept whole, while autocast reaches the matmuls in it. Casts of its operands give the same bits,
# but where it sums an operand before it multiplies.
_MULTIPLIES = frozenset({aten.einsum.default})


@dataclass
class Autocast:
    """Writes the casts of one policy down.

    _by_dtypes       (operator, dtypes of its tensors) -> those that its kernel gets
    _of_placeholder  (parameter or input, dtype) -> its cast
    """

    precision: Precision
    _by_dtypes: dict[tuple[Any, ...], list[torch.dtype]] = field(default_factory=dict)
    _of_placeholder: dict[tuple[fx.Node, torch.dtype], fx.Node] = field(default_factory=dict)

    def operands(
        self, b: Builder, target: torch._ops.OpOverload, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """The arguments as the operator's kernel gets them; casts are emitted.

        Raises `NotSupportedError` for an `autograd.Function`, whose own code autocast reaches.
        """
        if self.precision.autocast_dtype is None:
            return args, kwargs
        if function_of(str(target)) is not None:
            raise NotSupportedError(
                f"autograd.Function `{target}` under autocast, whose own code would be cast",
                hint="precision='bf16-mixed', or plain operators in its place",
            )
        if target in _MULTIPLIES:
            return pytree.tree_map_only(fx.Node, lambda n: self._halved(b, n), (args, kwargs))
        if not torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "AutocastCPU"):
            return args, kwargs
        kwargs = {a.name: kwargs[a.name] for a in target._schema.arguments if a.name in kwargs}
        nodes = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, fx.Node)]
        key = target, *(node.meta["val"].dtype for node in nodes)
        if key not in self._by_dtypes:
            self._by_dtypes[key] = self._dtypes(b, target, args, kwargs)
        dtypes = iter(self._by_dtypes[key])
        return pytree.tree_map_only(
            fx.Node, lambda node: self._cast(b, node, next(dtypes)), (args, kwargs)
        )

    def _halved(self, b: Builder, node: fx.Node) -> fx.Node:
        assert self.precision.autocast_dtype is not None
        is_wide = node.meta["val"].dtype == torch.float32
        return self._cast(b, node, self.precision.autocast_dtype) if is_wide else node

    def _dtypes(
        self, b: Builder, target: torch._ops.OpOverload, args: Any, kwargs: Any
    ) -> list[torch.dtype]:
        """The dtype in which the kernel gets each tensor, in order."""
        with b.mode:
            fake_args, fake_kwargs = pytree.tree_map_only(
                fx.Node, lambda node: torch.empty_like(node.meta["val"]), (args, kwargs)
            )
        # Below autograd, where a composite operator is still whole.
        with b.mode, torch.inference_mode(), self.precision.autocast(), _Operands(target) as seen:
            target(*fake_args, **fake_kwargs)
        return seen.dtypes

    def _cast(self, b: Builder, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if node.meta["val"].dtype == dtype:
            return node
        if node.op != "placeholder":
            return b.op(aten.to.dtype, node, dtype)
        key = node, dtype
        if key not in self._of_placeholder:
            self._of_placeholder[key] = b.op(aten.to.dtype, node, dtype)
        return self._of_placeholder[key]

    def use_in_half(self, parameters: dict[fx.Node, ParameterInfo]) -> None:
        """Parameters that only casts to one dtype read are used in it; their casts go."""
        for (parameter, dtype), cast in self._of_placeholder.items():
            if parameter not in parameters or {*parameter.users} != {cast}:
                continue
            parameter.meta["val"] = cast.meta["val"]
            cast.replace_all_uses_with(parameter)
            cast.graph.erase_node(cast)
            info = parameters[parameter]
            reduced = self.precision.reduced_from(dtype, info.dtype)
            parameters[parameter] = replace(info, reduce_dtype=reduced)


class _Operands(TorchDispatchMode):
    """The dtypes of the tensors that an operator is first called with."""

    def __init__(self, target: torch._ops.OpOverload) -> None:
        super().__init__()
        self._target = target
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is self._target and not self.dtypes:
            leaves = pytree.tree_leaves((args, kwargs))
            self.dtypes = [leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return func(*args, **(kwargs or {}))
