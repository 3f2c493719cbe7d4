"""The recipe that a user writes down in place of a search: Megatron's degrees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from autopar.errors import NotSupportedError, OptionError
from autopar.option_values import check_count, check_word, is_int

# Which operators of a block run again in backward, so that their results are not kept:
#   full             all of them; only the inputs of the block are kept
#   selective        all but matmuls, attention and collectives, whose results are kept
#   attention-core   scores, softmax, dropout and matmul with the values, or fused attention
#   gathers          gathers of activations: of what sequence parallelism gathers, shards are kept
Recompute = Literal["full", "selective", "attention-core", "gathers"]
MODES: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class Manual:
    """The Megatron recipe in place of a search. Ranks vary fastest over tp, then cp, dp, pp.

    dp, tp, pp   sizes of data, tensor and pipeline parallelism; their product, times cp, is the
                 mesh's ranks
    cp           parts of every sequence; keys and values go round a ring, or are gathered. With
                 `tp > 1` it needs `sp`
    sp           shard activations between tensor-parallel regions; no effect without `tp > 1`
    zero         the ZeRO stage over dp and cp, 0 to 3; no effect where both are 1
    microbatch_size   samples of one data-parallel rank; None: one microbatch
    recompute    none, or a mode of the option `recompute`, for every block
    interleave   stages of each rank (chunks); more than one with `pp > 1` only. The schedule is
                 then "interleaved", unless the option `schedule` names another
    ep           ranks that whole experts are divided over: some of those of dp and cp, and of tp if
                 `etp` is 1. Rows travel to their experts and back
    etp          ranks that each expert's features are divided over: tp, or 1; None: tp

    Raises `OptionError` for a value that is not allowed, `NotSupportedError` for one that is not
    built.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool = False
    zero: int = 0
    microbatch_size: int | None = None
    interleave: int = 1
    recompute: str = "none"

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "interleave"):
            check_count(f"Manual.{name}", getattr(self, name))
        if self.microbatch_size is not None:
            check_count("Manual.microbatch_size", self.microbatch_size)
        if not isinstance(self.sp, bool):
            raise OptionError(f"Manual.sp is True or False, not {self.sp!r}")
        if not is_int(self.zero) or self.zero not in range(4):
            raise OptionError(
                f"Manual.zero is a ZeRO stage, 0 to 3, not {self.zero!r}",
                hint="0 is plain data parallelism",
            )
        if self.interleave > 1 and self.pp == 1:
            raise OptionError(
                f"Manual(interleave={self.interleave}) has several stages on each rank, and pp=1",
                hint="give pp > 1, or leave interleave out",
            )
        if self.cp > 1 and self.tp > 1 and not self.sp:
            raise OptionError(
                f"Manual(cp={self.cp}, tp={self.tp}) cuts sequences over cp, and activations "
                "between matmuls are whole over tp",
                hint="give sp=True, so that sequences are cut there, too",
            )
        self._check_experts()
        check_word("Manual.recompute", self.recompute, ("none", *MODES), ())

    def _check_experts(self) -> None:
        """Raises `NotSupportedError` where experts need a fourth axis."""
        if self.etp is not None:
            check_count("Manual.etp", self.etp)
        text = f"Manual(dp={self.dp}, cp={self.cp}, tp={self.tp}, ep={self.ep}, etp={self.etp})"
        if self.etp not in (None, 1, self.tp):
            raise NotSupportedError(
                f"{text} divides tp in two axes",
                hint=f"give etp=1 or etp={self.tp}, or leave it out",
            )
        if self.ep % self._tensor_share:
            raise NotSupportedError(
                f"{text}: with etp=1 whole experts are divided over all ranks of tp",
                hint="make ep a multiple of tp, or leave etp out",
            )
        inner = self._rows_share
        if self.dp * self.cp % inner:
            raise OptionError(
                f"{text}: experts are divided over {inner} of dp x cp = {self.dp * self.cp} ranks",
                hint="ep divides dp x cp",
            )
        if self.cp > 1 and inner not in (1, self.cp, self.dp * self.cp):
            raise NotSupportedError(
                f"{text} has four axes: some of the ranks of dp or cp have the same experts",
                hint=f"make ep {self.cp * self._tensor_share} (cp) or "
                f"{self.dp * self.cp * self._tensor_share} (dp x cp), or leave cp out",
            )
        if self._tensor_share > 1 and inner > 1 and not self.sp:
            raise OptionError(
                f"{text} divides experts over tp, where ranks have the same rows, and over others",
                hint="give sp=True, so that rows are divided over tp, too",
            )

    @property
    def _tensor_share(self) -> int:
        """Over how many ranks of tp whole experts are divided."""
        return self.tp if self.etp == 1 else 1

    @property
    def _rows_share(self) -> int:
        """Over how many ranks of dp and cp."""
        return self.ep // self._tensor_share

    @property
    def axes(self) -> dict[str, int]:
        """The axes of a stage, outermost first."""
        inner = self._rows_share
        if self.cp > 1:
            return {"dp": self.dp, "cp": self.cp, "tp": self.tp}
        between = {"ep": inner} if inner > 1 else {}
        return {"dp": self.dp // inner, **between, "tp": self.tp}

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes over which whole experts are divided."""
        inner, found = self._rows_share, list[str]()
        if inner > 1:
            found = ["ep"] if self.cp == 1 else ["cp"] if inner == self.cp else ["dp", "cp"]
        return (*found, *(["tp"] if self._tensor_share > 1 else []))

    @property
    def n_ranks(self) -> int:
        """The ranks that the recipe is for."""
        return self.dp * self.tp * self.pp * self.cp
