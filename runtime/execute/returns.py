"""Gradients of converted uses on their way back to storage, beside backward.

    a gradient is there           `ready`: a bucket starts with the last of its gradients
    the period is over            `finish`: the calls are waited for, in the order in which they
                                  began; sums are added to `.grad`

A period is a microbatch (ZeRO-2) or a step (ZeRO-1, data parallelism), whose buckets start in its
last backward. Which gradients share a bucket, and in which order, is `return_buckets`: the same on
all ranks, whatever is ready first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from autopar.program.communication import return_bucket_bytes, return_buckets
from autopar.program.lines import StageProgram, taken_parameters
from autopar.runtime.execute.bucketed import Chain, bucketed_apply, start_bucket
from autopar.runtime.execute.conversions import Conversions, Use
from autopar.runtime.groups import Pending, phase


class Returns:
    """The way back of one period's gradients, for one rank. `begin` starts a step."""

    def __init__(self, program: StageProgram, period: str, conversions: Conversions) -> None:
        waiting, fused = return_buckets(program, period)
        self._bucket_bytes = return_bucket_bytes(waiting)
        place = {name: i for i, name in enumerate(taken_parameters(program))}
        self._places = [place[use.local.name] for _, use in waiting]
        self._positions = {k: i for i, k in enumerate(self._places)}
        self._steps = [conversions.steps(use.moves, backward=True) for _, use in waiting]
        self._members = [bucket.members for bucket in fused if bucket.round == 0]
        self._bucket_of = {i: k for k, members in enumerate(self._members) for i in members}

    def begin(self, uses: Sequence[Use]) -> None:
        """Take the uses of a step, in the order in which the program takes them."""
        self._uses = uses
        self._chains: dict[int, Chain] = {}
        self._missing = [len(members) for members in self._members]
        self._under_way: list[Pending[None]] = []

    def ready(self, place: int) -> None:
        """The gradient of a use is complete; begin its bucket's collective if it is the last."""
        i = self._positions.get(place)
        if i is None:
            return
        use = self._uses[place]
        if use.gradient is None:
            return
        self._chains[i] = Chain(use.gradient, list(self._steps[i]))
        use.gradient = None
        k = self._bucket_of.get(i)
        if k is None:
            return
        self._missing[k] -= 1
        if not self._missing[k]:
            with phase("grad_sync"):
                chains = [self._chains[i] for i in self._members[k]]
                self._under_way.append(start_bucket(chains, owns=True))

    def finish(self, stored: Mapping[str, Tensor]) -> None:
        """Wait for all calls, run what is left, and add the results to `.grad`."""
        for place in self._places:
            self.ready(place)
        for pending in self._under_way:
            pending.wait()
        chains = [(self._uses[self._places[i]], self._chains[i]) for i in sorted(self._chains)]
        self.begin(self._uses)
        items = []
        for _, chain in chains:
            assert chain.value is not None
            items.append((chain.value, tuple(chain.steps)))
            chain.value = None
        with phase("grad_sync"):
            values = bucketed_apply(items, self._bucket_bytes)
        items.clear()
        for (use, _), value in zip(chains, values, strict=True):
            parameter = stored[use.parameter.name]
            if parameter.grad is None:
                whole = value.to(parameter.dtype)
                parameter.grad = whole.clone() if whole._base is not None else whole
            else:
                parameter.grad += value
