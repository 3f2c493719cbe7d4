"""Which rows of a program are packed documents, of which `lengths=` is the distribution."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.errors import OptionError
from autopar.lengths import Lengths
from autopar.program.graph import Operator


def check_lengths(operators: Iterable[Operator], lengths: Lengths) -> None:
    """Raise `OptionError` if `lengths` are longer than rows, or if no price depends on them."""
    if not lengths:
        return
    calls = [operator.call for operator in operators if operator.call.args.get("documents")]
    rows = [call.inputs[1][-2] for call in calls]
    if not rows:
        raise OptionError(
            "lengths= changes nothing: no attention of this model is to documents of the batch, "
            "one range of keys for each row",
            hint="leave it out. Documents are known where inputs number them, as position_ids that "
            "begin anew do for transformers, in rows of 65,536 tokens or more; a causal mask alone "
            "has none, and a shorter mask is computed whole",
        )
    longest = lengths[-1][0]
    if longest > min(rows):
        raise OptionError(
            f"lengths= has documents of {longest} tokens, and a row has {min(rows)}",
            hint="a document that is longer is cut: give its share to the length of a row",
        )
