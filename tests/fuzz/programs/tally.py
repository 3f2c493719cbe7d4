"""Counts over programs: outcomes, refusals by reason, operators of the rules."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from autopar.rules import all_rules
from tests.fuzz.programs.compare import REFUSED, Outcome
from tests.fuzz.programs.layouts import Layout

# Refusals that programs of this grammar may meet, and why they stay.
KNOWN = {
    r"changes memory that .* reads through another view": "the graph has no memory",
    r"reads elements that it writes": "torch leaves the result open",
    r"no plan satisfies the constraints": "a recipe that the program cannot have",
    r"has no functional form": "torch composes some functions of writes that capture does not know",
    r"Net has no repeated blocks": "a block of which nothing is left is none to recompute",
    r"rows of a microbatch do not divide": "a batch that a program cut itself",
    r"changes inside torch.utils.checkpoint": "eager moves such a buffer twice",
    r"depends on no trainable parameter": "all that the loss needs is frozen",
    r"the model can be cut into \d+ stage": "fewer operators than stages",
}
# Operators of the rules that no program reaches, and why.
_AS_OTHERS = (
    "to.dtype_layout to.device _to_copy.default fill.Scalar type_as.default clone.default "
    "contiguous.default alias.default mean.dim mean.default nll_loss.default view.default "
    "_unsafe_view.default flatten.using_ints unflatten.int squeeze.default squeeze.dim squeeze.dims"
)
_OVERLOADS = "div.Scalar norm.Scalar"
_CONSTANT = "zeros.default ones.default full.default"
_BY_DATA = "bincount.default repeat_interleave.Tensor"
UNREACHED: dict[str, str] = {
    **{f"aten.{op}": "capture writes it by other operators" for op in _AS_OTHERS.split()},
    **{f"aten.{op}": "functions of torch call another overload" for op in _OVERLOADS.split()},
    **{f"aten.{op}": "a constant, made once for all steps" for op in _CONSTANT.split()},
    **{f"aten.{op}": "refused, since its shape depends on data" for op in _BY_DATA.split()},
    **dict.fromkeys(
        ("autopar.padded_embedding.default", "autopar.padded_cross_entropy.default"),
        "made by plans that pad a vocabulary",
    ),
}


# Refusals that stay under microbatches, and under drawn placements alone.
_OF_MICROBATCHES = {r"cannot trace Net into one graph": "shapes that hold for the whole batch"}
_OF_PLACEMENTS = {r"changes buffer `.*`, which stage \d+ reads": "a cut that no plan makes"}


def is_known(layout: Layout, refusal: str) -> bool:
    known = KNOWN | (_OF_MICROBATCHES if "microbatches" in dict(layout.options) else {})
    known |= _OF_PLACEMENTS if layout.placements is not None else {}
    return any(re.search(pattern, refusal) for pattern in known)


@dataclass
class Tally:
    """What programs came to."""

    n_programs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def take(self, layout: Layout, found: Outcome) -> None:
        """Count one run."""
        self.n_programs += layout.n_ranks == 1
        self.outcomes[f"{found.what} on {layout.n_ranks}"] += 1
        if found.what == REFUSED:
            self.refusals[re.sub(r"`[^`]*`", "...", found.key)[:120]] += 1

    def text(self) -> str:
        lines = [f"{n:6}  {what}" for what, n in sorted(self.outcomes.items())]
        lines += [f"{n:6}  {reason}" for reason, n in self.refusals.most_common()]
        return "\n".join((f"{self.n_programs} programs", *lines, ""))


def table(operators: Counter[str]) -> str:
    """How often each operator of the rules appears."""
    return "".join(f"{operators[rule.op]:6}  {rule.op}\n" for rule in all_rules())
