"""What messages between stages take at least.

A value that crosses between stages crosses at least once per microbatch, in one slice or more, and
so does its gradient. A stage of n ranks sends or receives a message through n links. So with the
values in a message, their bytes for the global batch, and m microbatches, some rank takes at least

    (max(values, n) * latency + bytes / m * s_per_byte) / n
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.arrays import Array
from autopar.mesh import Link
from autopar.passes.analysis import Analysis
from autopar.passes.inter.layers import Layers


@dataclass(frozen=True, eq=False)
class Sent:
    """One message of every range of layers as a stage, [first layer, last layer]: how many values,
    and seconds of their bytes for the global batch."""

    n_values: Array
    bytes_s: Array

    def seconds(self, latency_s: float, n_ranks: int, n_microbatches: int) -> Array:
        """At least so long for one microbatch; 0 where nothing is sent."""
        n_slices = np.where(self.n_values > 0, np.maximum(self.n_values, n_ranks), 0)
        each_s: Array = (n_slices * latency_s + self.bytes_s / n_microbatches) / n_ranks
        return each_s


@dataclass(frozen=True, eq=False)
class LeastMessages:
    """The least seconds of messages, of every range of layers as a stage.

    onward   values that the next layer reads: surely some of the next stage's
    back     their gradients
    sent     values that any later layer reads
    """

    latency_s: float
    onward: Sent
    back: Sent
    sent: Sent

    @staticmethod
    def of(analysis: Analysis, layers: Layers, links: Sequence[Link]) -> LeastMessages:
        types, made, readers = analysis.types.tensors, dict[str, int](), dict[str, set[int]]()
        for layer, (first, end) in enumerate(layers.ranges):
            for operator in analysis.operators[first:end]:
                made |= dict.fromkeys(operator.outputs, layer)
                for value in operator.inputs:
                    readers.setdefault(value, set()).add(layer)
        ratio = min(link.ratio("send_recv") for link in links)
        s_per_byte = ratio * min(link.s_per_byte for link in links)
        onward, back, sent = np.zeros((3, 2, layers.n_layers, layers.n_layers))
        for value, layer in made.items():
            each = np.array([1.0, types[value].size_bytes * s_per_byte])
            after = [reader for reader in readers.get(value, ()) if reader > layer]
            for reader in after:
                onward[:, : layer + 1, reader - 1] += each[:, None]
                if types[value].has_grad:
                    back[:, : layer + 1, reader - 1] += each[:, None]
            if after:
                sent[:, : layer + 1, layer : max(after)] += each[:, None, None]
        latency_s = ratio * min(link.latency_s for link in links)
        return LeastMessages(latency_s, Sent(*onward), Sent(*back), Sent(*sent))

    def onward_s(self, n_ranks: int, n_microbatches: int) -> Array:
        """One microbatch's message to the next stage."""
        return self.onward.seconds(self.latency_s, n_ranks, n_microbatches)

    def passed_s(self, n_ranks: int, n_microbatches: int) -> Array:
        """One microbatch's message to the next stage, and the one back."""
        on = self.latency_s, n_ranks, n_microbatches
        return self.onward_s(n_ranks, n_microbatches) + self.back.seconds(*on)

    def sent_s(self, n_ranks: int, n_microbatches: int) -> Array:
        """What one rank sends in the forwards of a step, one message after the other."""
        each_s = self.sent.seconds(self.latency_s, n_ranks, n_microbatches)
        return n_microbatches * each_s
