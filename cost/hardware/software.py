"""Software: what runs on a device, as named features and a few constants, each with its source.

A device's profile says what its kernels and links do alone (`profile.py`). What a whole step of
training reaches of that depends on the software: which kernels it calls, what it hides, and how
steadily its ranks run. A software is a TOML file:

    about               one line
    [features]          those of `Software`; what is left out is False, or torch's loss
    [constants.NAME]    value and source, as in a profile
    [intervals.DEVICE]  value and source: predicted steps times and over this ratio hold 80% of the
                        published ones; "any": on any device; else the widest of all software

Constants hold on every device. They are fitted to published runs of that software
(`cost/published/fit.py`), never to one paper or row:

    sustained_rate_ratio   rate of tensor cores (matmuls, fused attention) in a whole step / alone
                           (clocks under the power limit, caches that neighbours have filled)
    memory_time_ratio      time of bytes in device memory in a whole step / in a copy alone
                           (kernels of norms, dropout and sums do not stream as a copy does)
    network_time_ratio     time of bytes between nodes in a whole step / alone
    jitter_fraction        standard deviation of a rank's step time / its mean; the slowest of N
                           ranks decides (`slowest_of`)
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from autopar.cost.hardware.profile import Profile, Quantity
from autopar.errors import OptionError

SOFTWARE_FOLDER = Path(__file__).parent / "stacks"

# Constants, and what holds where a software says nothing.
CONSTANTS: dict[str, float] = {
    "sustained_rate_ratio": 1.0,
    "network_time_ratio": 1.0,
    "memory_time_ratio": 1.0,
    "jitter_fraction": 0.0,
}
# Of two plans of one model, batch and machine, the ratio of steps is predicted within this share
# for half of the 253 pairs among the shipped runs (2026-11-30): what both share cancels.
PAIR_ERROR = 0.048
# Tensor cores are what heats a device; no published run computes in float32.
_SUSTAINED = (
    *(f"device.achieved_flops_fraction.{name}" for name in ("float16", "bfloat16", "tfloat32")),
    "device.attention_fraction.",
)
_NETWORK, _MEMORY = "link.inter_node.s_per_byte", "device.achieved_bandwidth_fraction"


# How cross-entropy runs (`cost/transformer/chunks.py` has its bytes): torch's operators; one kernel
# with one float32 copy of the logits; Megatron's, each step of which overwrites the float32 logits;
# Megatron's "native" fusion, a few compiled kernels with results of their own; Transformer
# Engine's, which overwrites the logits.
Loss = Literal["torch", "fused", "in-place", "copied", "engine"]


@dataclass(frozen=True)
class Software:
    """Named features of a training run, none of which is a decision of a plan.

    fused_attention        one kernel computes scores, softmax and output; scores are never stored
    new_attention          that kernel is made for the device (cuDNN, FlashAttention-3, which
                           Transformer Engine calls), not FlashAttention-2
    fused_kernels          a chain of elementwise operators is one kernel (hand-written or compiled)
    clips_gradients        gradients are clipped by their norm before each update, then zeroed
    fused_optimizer        the update of all parameters is one kernel, without temporaries
    stops_recompute        a layer that runs again stops at the last value that backward reads, so
                           its last matmul does not (torch.utils.checkpoint, `early_stop`;
                           Megatron-LM's own checkpoints run whole layers)
    fused_accumulation     the matmul that makes a weight's gradient adds it to earlier ones
    loss                   how cross-entropy runs
    cuda_graphs            kernels are launched from recorded graphs, at no cost of the host's
    float8                 matmuls of layers, but the router's, are in float8, whose operands are
                           cast: activations and gradients each microbatch, weights once a step
    dropout                0.1 on attention scores and on both residual branches
    fp32_gradients         gradients accumulate in float32
    fp32_parameters        parameters are kept in float32 and cast where they are used (FSDP)
    overlapped_sync        gradients are reduced while the last backward runs
    overlapped_tp          collectives of tensor parallelism run in chunks, under their matmuls
    overlapped_experts     exchanges of experts run under another microbatch's compute
    overlapped_gathers     ZeRO-3 gathers a layer while the one before computes
    gathers_by_layer       ZeRO-3 gathers a layer in one call; else each of its tensors alone, as a
                           list of shards
    sequence_first         activations are [s, b, h], so that shards of a sequence are contiguous;
                           else collectives over it copy all that they gather or scatter (torch,
                           distributed/_functional_collectives.py, `all_gather_tensor`)
    split_messages         each of tp ranks sends its part of an activation to the next stage,
                           which gathers it (arXiv 2104.04473, section 4.1)
    interleaves            a rank can have several chunks of layers
    waits_for_messages     a stage computes nothing while it sends to or receives from another
    thrifty_dispatch       a token goes once to each node, and once to each rank, that holds any of
                           its experts (DeepEP), instead of once per expert
    transformer_engine     layers are Transformer Engine's, which has workspaces of its own
    wide_workspace         cuBLAS has 32 MiB on every device (CUBLAS_WORKSPACE_CONFIG=:4096:8, as
                           deterministic runs set it)
    muon                   matrices have one moment (Muon), other parameters AdamW's two

    `constants` and `intervals`: as in the module docstring.
    """

    name: str = "custom"
    fused_attention: bool = True
    new_attention: bool = False
    fused_kernels: bool = True
    fused_optimizer: bool = True
    clips_gradients: bool = True
    fused_accumulation: bool = True
    stops_recompute: bool = False
    loss: Loss = "torch"
    cuda_graphs: bool = False
    float8: bool = False
    dropout: bool = False
    fp32_gradients: bool = True
    fp32_parameters: bool = False
    overlapped_sync: bool = True
    overlapped_tp: bool = False
    overlapped_experts: bool = False
    overlapped_gathers: bool = True
    gathers_by_layer: bool = True
    sequence_first: bool = True
    split_messages: bool = True
    interleaves: bool = True
    waits_for_messages: bool = False
    thrifty_dispatch: bool = False
    transformer_engine: bool = False
    wide_workspace: bool = False
    muon: bool = False
    constants: Mapping[str, Quantity] = field(default_factory=dict, compare=False)
    intervals: Mapping[str, Quantity] = field(default_factory=dict, compare=False)

    @property
    def fuses_loss(self) -> bool:
        return self.loss in ("fused", "copied", "engine")

    def constant(self, name: str) -> float:
        found = self.constants.get(name)
        return CONSTANTS[name] if found is None else found.value

    def with_constants(self, values: Mapping[str, float]) -> Software:
        """This software with some constants replaced."""
        changed = {name: Quantity(value, "fit") for name, value in values.items()}
        return replace(self, constants={**self.constants, **changed})

    def apply_to(self, profile: Profile) -> Profile:
        """What a device reaches under this software in a whole step."""
        factors = {
            _MEMORY: 1.0 / self.constant("memory_time_ratio"),
            _NETWORK: self.constant("network_time_ratio"),
            **dict.fromkeys(_SUSTAINED, self.constant("sustained_rate_ratio")),
        }
        changed = dict(profile.quantities)
        if self.new_attention:
            for phase in ("forward", "backward"):
                if new := changed.get(f"device.new_attention_fraction.{phase}"):
                    changed[f"device.attention_fraction.{phase}"] = new
        for key, quantity in changed.items():
            factor = next((f for start, f in factors.items() if key.startswith(start)), 1.0)
            if factor != 1.0:
                source = f"{quantity.source}; times {factor:g} under {self.name}"
                changed[key] = Quantity(quantity.value * factor, source)
        return replace(profile, quantities=changed)

    def interval_ratio(self, profile: str) -> float:
        """80% of published steps lie within this ratio of the predicted ones.

        It is that of runs left out of the fit, by device (`cost/published/fit.py`).
        """
        found = self.intervals.get(profile, self.intervals.get("any"))
        return widest_interval() if found is None else found.value

    def slowest_of(self, n_ranks: int) -> float:
        """The step of the slowest of N ranks / a rank's mean step.

        The mean of the greatest of N normal numbers is about sqrt(2 ln N) standard deviations.
        """
        return 1.0 + self.constant("jitter_fraction") * math.sqrt(2.0 * math.log(max(n_ranks, 1)))


def share_under_matmul(kind: str, n_ranks: int) -> float:
    """The share of a collective that runs under its matmul (`overlapped_tp`).

    It has a chunk per rank of its group, and compute waits for one. An all_reduce is waited for:
    Megatron-LM refuses `tp_comm_overlap` without sequence parallelism (`training/arguments.py`).
    """
    return 1.0 - 1.0 / n_ranks if kind in ("all_gather", "reduce_scatter") else 0.0


# With the value of what a file leaves out.
FEATURES = {f.name: False for f in fields(Software) if f.type == "bool"} | {"loss": "torch"}


def software_of(name: str, *, is_gpu: bool) -> Software:
    """The software of a plan by the option of this name; "autopar" on CPUs is measured there."""
    return load_software("autopar-cpu" if name == "autopar" and not is_gpu else name)


@cache
def available_software() -> tuple[str, ...]:
    """The names of the shipped software."""
    return tuple(sorted(path.stem for path in SOFTWARE_FOLDER.glob("*.toml")))


@cache
def load_software(name: str) -> Software:
    """A shipped software by name. Raises `OptionError` for an unknown one."""
    if name not in available_software():
        raise OptionError(
            f"unknown software {name!r}", hint=f"it is one of {', '.join(available_software())}"
        )
    content = tomllib.loads((SOFTWARE_FOLDER / f"{name}.toml").read_text())
    features: dict[str, Any] = FEATURES | content["features"]
    constants = {key: Quantity(**entry) for key, entry in content.get("constants", {}).items()}
    intervals = {key: Quantity(**entry) for key, entry in content.get("intervals", {}).items()}
    assert set(features) == set(FEATURES) and set(constants) <= set(CONSTANTS), name
    return Software(name=name, constants=constants, intervals=intervals, **features)


@cache
def widest_interval() -> float:
    """The ratio of an interval where no run of this software on this device is known."""
    known = [
        found for name in available_software() for found in load_software(name).intervals.values()
    ]
    return max((found.value for found in known), default=1.0)
