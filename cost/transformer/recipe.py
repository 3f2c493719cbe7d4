"""How a transformer is laid out and with what software: the Megatron recipe as numbers.

Ranks vary tp fastest, then cp, then dp, then pp (Narayanan et al., arXiv 2104.04473, section 3.2).
Experts are spread over ep of the dp x cp x tp ranks of a stage.

`Software` holds features of a run that change its step time but are no decision of a plan. Each
feature has a general name, which runs of any paper can have; none belongs to one paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.errors import OptionError

# "modules" recomputes the modules in `Recipe.recomputed`, and keeps their inputs.
Recompute = Literal["none", "selective", "attention-core", "modules", "full"]
Module = Literal["norm", "activation", "core", "feed-forward"]
# "zero-bubble-2" starts the next step before the last has ended on all devices (ZB-H2).
Order = Literal["1f1b", "interleaved", "zero-bubble", "zero-bubble-2", "gpipe"]


@dataclass(frozen=True)
class Software:
    """Named features of a training run.

    fused_attention        one kernel computes scores, softmax and output; scores are never stored
    new_attention          that kernel is made for the device (cuDNN, FlashAttention-3, which
                           Transformer Engine calls), not FlashAttention-2
    fused_kernels          a chain of elementwise operators is one kernel (hand-written or compiled)
    fused_optimizer        the update of all parameters is one kernel, without temporaries
    overlapped_sync        gradients are reduced while the last backward runs
    dropout                0.1 on attention scores and on both residual branches
    fp32_gradients         gradients accumulate in float32
    fused_accumulation     the matmul that makes a weight's gradient adds it to earlier ones
    fp32_parameters        parameters are kept in float32 and cast where they are used (FSDP)
    split_messages         each of tp ranks sends its part of an activation to the next stage,
                           which gathers it (arXiv 2104.04473, section 4.1)
    waits_for_messages     a stage computes nothing while it sends to or receives from another
    thrifty_dispatch       a token goes once to each node, and once to each rank, that holds any of
                           its experts (DeepEP), instead of once per expert
    fused_loss             cross-entropy in one kernel, one float32 copy of the logits
    in_place_loss          each step of the loss overwrites the float32 logits (Megatron)
    copied_loss            the loss is a few compiled kernels with results of their own (Megatron's
                           "native" fusion)
    engine_loss            the loss is Transformer Engine's, which overwrites the logits
    transformer_engine     layers are Transformer Engine's, which has workspaces of its own
    wide_workspace         cuBLAS has 32 MiB on every device (CUBLAS_WORKSPACE_CONFIG=:4096:8, as
                           deterministic runs set it)
    muon                   matrices have one moment (Muon), other parameters AdamW's two
    """

    fused_attention: bool = True
    new_attention: bool = False
    fused_kernels: bool = True
    fused_optimizer: bool = True
    overlapped_sync: bool = True
    dropout: bool = False
    fp32_gradients: bool = True
    fused_accumulation: bool = True
    fp32_parameters: bool = False
    split_messages: bool = True
    waits_for_messages: bool = False
    thrifty_dispatch: bool = False
    fused_loss: bool = False
    in_place_loss: bool = False
    copied_loss: bool = False
    engine_loss: bool = False
    transformer_engine: bool = False
    wide_workspace: bool = False
    muon: bool = False


@dataclass(frozen=True)
class Recipe:
    """A plan made by hand. `microbatch_size` and `global_batch` are in sequences.

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
    recompute: Recompute = "none"
    microbatch_size: int = 1
    global_batch: int = 1
    order: Order = "1f1b"
    recomputed: tuple[Module, ...] = ()
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
    def n_ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def n_microbatches(self) -> int:
        return self.global_batch // (self.dp * self.microbatch_size)

    @property
    def n_chunks(self) -> int:
        """Stages of the schedule: several per device if they interleave."""
        return self.pp * self.interleave
