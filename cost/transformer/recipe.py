"""How a transformer is laid out: the Megatron recipe as numbers, and the schedule that it runs.

Ranks vary tp fastest, then cp, then dp, then pp (Narayanan et al., arXiv 2104.04473, section 3.2).
Experts are spread over ep of the dp x cp x tp ranks of a stage. Ranks that share an expert are
consecutive; then come those of other experts. Ranks that hold the same experts are ep x etp apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autopar.errors import OptionError
from autopar.schedule import ORDERS, Schedule, Script, devices_of, script_of, zero_bubble

# Groups of ranks; those of "dp" and "expert_dp" hold the same parameters, "ends" a tied embedding.
Group = Literal["tp", "cp", "dp", "etp", "ep", "expert_dp", "ends"]
# "zero-bubble-2" starts the next step before the last has ended on all devices (ZB-H2).
Order = Literal["1f1b", "interleaved", "zero-bubble", "zero-bubble-2", "gpipe"]


@dataclass(frozen=True)
class Recipe:
    """A plan made by hand. `microbatch_size` and `global_batch` are in sequences.

    recompute     words of `AGAIN` (`memory.py`), joined by commas
    etp           ranks that share an expert
    zero_shards   ranks over which ZeRO divides; None: all of data parallelism
    deferred      microbatches whose gradient of the head waits until the pipeline is empty

    Raises `OptionError` if the batch is not a whole number of microbatches on every dp rank.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    interleave: int = 1
    sp: bool = False
    zero: int = 0
    recompute: str = "none"
    microbatch_size: int = 1
    global_batch: int = 1
    order: Order = "1f1b"
    etp: int = 1
    zero_shards: int | None = None
    deferred: int = 0

    def __post_init__(self) -> None:
        each = self.dp * self.microbatch_size
        if self.global_batch % each:
            raise OptionError(
                f"a batch of {self.global_batch} is not a whole number of microbatches of "
                f"{self.microbatch_size} on dp={self.dp} ranks"
            )

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of parameters are separate actions."""
        return self.order in ("zero-bubble", "zero-bubble-2")

    @property
    def ranks_per_stage(self) -> int:
        return self.tp * self.cp * self.dp

    @property
    def n_ranks(self) -> int:
        return self.ranks_per_stage * self.pp

    @property
    def n_microbatches(self) -> int:
        return self.global_batch // (self.dp * self.microbatch_size)

    @property
    def n_chunks(self) -> int:
        """Stages of the schedule: several per device if they interleave."""
        return self.pp * self.interleave

    def group(self, name: Group) -> tuple[int, int]:
        """Ranks of a group, and how far they are apart."""
        of_expert = self.ep * self.etp
        sizes: dict[Group, tuple[int, int]] = {
            "tp": (self.tp, 1),
            "cp": (self.cp, self.tp),
            "dp": (self.dp * self.cp, self.tp),
            "etp": (self.etp, 1),
            "ep": (self.ep, self.etp),
            "expert_dp": (max(self.ranks_per_stage // of_expert, 1), of_expert),
            "ends": (2, self.ranks_per_stage * (self.pp - 1)),
        }
        return sizes[name]

    def shards(self, copies: Group) -> int:
        """Ranks over which ZeRO divides what all ranks of a group hold."""
        n_copies = self.dp * self.cp // self.zero_shards if self.zero_shards else 1
        return max(self.group(copies)[0] // n_copies, 1) if self.zero else 1

    @cached_property
    def schedule(self) -> Schedule:
        """The order of actions on every device; messages are those of a chain of stages."""
        if self.order == "zero-bubble-2":
            return zero_bubble(range(self.pp), self.n_microbatches, zb_h2=True)
        word = "1f1b" if self.interleave == 1 and self.order == "interleaved" else self.order
        return ORDERS[word](devices_of(word, self.pp, self.interleave), self.n_microbatches)

    @cached_property
    def script(self) -> Script:
        """That schedule, with each message sent as soon as it is made."""
        return script_of(self.schedule, sends_as_made=True)
