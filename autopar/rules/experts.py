"""Rules of a product of each row with the matrix of its own expert.

    n i, e o i, n -> n o        x, weights, ids; e i o where the weights are transposed

Rows and features shard as in any product. Where the experts are sharded, a rank computes the
rows of its own experts: either of all rows, the others zero, so that the sum over ranks is the
result (`EXPERTS`); or the rows are sharded too, and go to the rank of their expert and back
(`ROWS_AND_EXPERTS`), which is expert parallelism as mixtures of experts are trained with.

How many rows a rank's experts get depends on the data. Seconds and bytes are those of rows that
are spread evenly; collectives are counted by a rank's own rows, which is exact.
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
    saved_bytes="8*n",  # localised ids (int64)
    forward_bytes="n*(i + o)*item/(e*ranks)",  # the rows of one expert, and their products
    backward_bytes="n*(i + o)*item/(e*ranks)",
)

# Rows are sent as x has them; what is sent and received back are a rank's own rows.
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
    saved_bytes="n*i*item + 24*n",  # received rows, their ids, the order of those sent
    forward_bytes="n*Max(i, 2*o)*item",  # rows sent; then products made and received
    backward_bytes="2*n*Max(i, o)*item",
)


def _expert_linear(call: OpCall) -> Notation:
    weight = "e i o" if call.args["transposed"] else "e o i"
    return Notation.parse(f"n i, {weight}, n -> n o")


EXPERT_PRODUCTS = (
    OpRule(
        str(operators.experts.expert_linear._opoverload),
        _expert_linear,
        "2*n*i*o",
        linear=((0,), (1,)),
        lower={"e": EXPERTS, "n e": ROWS_AND_EXPERTS},
    ),
)
