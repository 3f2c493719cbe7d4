"""Rules of the matmul of each row with the matrix of its own expert.

    n i, e o i, n -> n o        x, weights, ids; weights are e i o if transposed

Rows and features shard as in any matmul. The experts shard in two ways:

    EXPERTS             every rank has all rows and computes those of its own experts; the others
                        are zero, so the sum over ranks is the result
    ROWS_AND_EXPERTS    rows are sharded too; each goes to the rank of its expert and back. This is
                        the usual expert parallelism of mixtures of experts

How many rows a rank's experts get depends on the data. Seconds and bytes assume rows that are
spread evenly. Sizes of collectives use a rank's own rows, which is exact.
"""

from __future__ import annotations

from autopar import operators
from autopar.placement import Notation
from autopar.rules.lowering import GROUP, Inner, Lowering
from autopar.rules.rule import OpCall, OpRule

ARGUMENTS = ("x", "weight", "ids", GROUP, "transposed")

EXPERTS = Lowering(
    "expert_parallel_linear",
    ARGUMENTS,
    keeps=("x", "weight"),
    saved_bytes="8*n",  # local ids (int64)
    forward_bytes="n*(i + o)*item/(e*ranks)",  # rows of one expert, and their results
    backward_bytes="n*(i + o)*item/(e*ranks)",
)

# A rank sends its own rows of x, and receives their results back.
_SENT, _RETURNED = "n*i*item", "n*o*item"
ROWS_AND_EXPERTS = Lowering(
    "expert_exchange_linear",
    ARGUMENTS,
    inner=(
        Inner("all_to_all", "8*e*ranks"),  # rows per expert (int64)
        Inner("all_to_all", _SENT),
        Inner("all_to_all", _RETURNED),
        Inner("all_to_all", _RETURNED, "backward"),
        Inner("all_to_all", _SENT, "backward", gradient_of=0),
    ),
    keeps=("weight",),
    saved_bytes="n*i*item + 24*n",  # received rows, their ids, the order of the sent rows
    forward_bytes="n*Max(i, 2*o)*item",  # rows sent; then results computed and received
    backward_bytes="2*n*Max(i, o)*item",
)


def _expert_linear(call: OpCall) -> Notation:
    weight = "e i o" if call.args["transposed"] else "e o i"
    return Notation.parse(f"n i, {weight}, n -> n o")


EXPERT_MATMULS = (
    OpRule(
        str(operators.experts.expert_linear._opoverload),
        _expert_linear,
        "2*n*i*o",
        linear=((0,), (1,)),
        lower={"e": EXPERTS, "n e": ROWS_AND_EXPERTS},
    ),
)
