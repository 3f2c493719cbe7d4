"""Rules of matmuls of each row with the matrix of its own expert, alone and in pairs.

    n i, e o i, n -> n o                  x, weights, ids; weights are e i o if transposed
    n i!, e (g f) i, e o! f, n -> n o     a mixture: x, both weights, ids; g = 2 if it is gated;
                                          then the bias of the features, e (g f), if there is one
    n i!, e f i, e f i, e o! f, n -> n o  a gated one whose gate and up have matrices of their own

Rows and features shard as in any matmul; in a mixture, the features between its matmuls, so that
each rank has a part of every expert. The experts shard in two ways:

    EXPERTS             every rank has all rows and computes those of its own experts; the others
                        are zero, so the sum over ranks is the result
    ROWS_AND_EXPERTS    rows are sharded too; each goes to the rank of its expert and back. This is
                        the usual expert parallelism of mixtures of experts

How many rows a rank's experts get depends on the data: `imbalance` times as many as if rows were
spread evenly (the option of that name). Sizes of collectives use a rank's own rows, which is exact.
"""

from __future__ import annotations

from dataclasses import replace

from autopar import operators
from autopar.placement import Notation
from autopar.rules.lowering import GROUP, Inner, Lowering
from autopar.rules.rule import OpCall, OpRule

_LINEAR = ("x", "weight", "ids", GROUP, "transposed")

# A rank keeps the rows of its experts, and their positions (int64). Temporaries are the most of the
# moments that matter, less the results that are not there yet.
_MINE = "imbalance*n/ranks"
EXPERTS = Lowering(
    "expert_parallel_linear",
    _LINEAR,
    keeps=("weight",),
    saved_bytes=f"{_MINE}*(i*item + 8)",
    forward_bytes=f"{_MINE}*o*item",  # results
    backward_bytes=f"{_MINE}*(o + i)*item",  # gradients of results, then of rows
    uneven=True,
)
# A rank sends its own rows of x, and receives their results back.
_SENT, _RETURNED = "n*i*item", "n*o*item"
_RECEIVED = "imbalance*n"
ROWS_AND_EXPERTS = Lowering(
    "expert_exchange_linear",
    _LINEAR,
    inner=(
        Inner("all_gather", "8*e*ranks*ranks"),  # every rank's rows per expert (int64)
        Inner("all_to_all", _SENT),
        Inner("all_to_all", _RETURNED),
        Inner("all_to_all", _RETURNED, "backward"),
        Inner("all_to_all", _SENT, "backward", gradient_of=0),
    ),
    keeps=("weight",),
    # Received rows and their order; the order of the sent rows.
    saved_bytes=f"{_RECEIVED}*(i*item + 8) + 8*n",
    # Results in two orders, or rows in two orders. Backward alike, with gradients.
    forward_bytes=f"item*(Max(2*{_RECEIVED}*o, {_RECEIVED}*i) - n*o)",
    backward_bytes=f"item*({_RECEIVED}*(i + Max(o, i)) - n*i)",
    uneven=True,
)
_GATHERED, *_EXCHANGED = ROWS_AND_EXPERTS.inner


def _mixtures(
    name: str, arguments: tuple[str, ...], keeps: tuple[str, ...], g: str, n_into: int
) -> dict[str, Lowering]:
    """Of mixtures with g f features before the activation, by `n_into` matmuls."""
    of_experts = replace(
        EXPERTS,
        function=f"expert_parallel_{name}",
        arguments=arguments,
        keeps=keeps,
        saved_bytes=f"{_MINE}*(i*item + {g}*f*item + 8)",
        forward_bytes=f"item*Max({_MINE}*o, {_MINE}*(f + o) - n*o)",
        backward_bytes=f"item*Max({_MINE}*(o + {g}*f + 2*f) - n*i - e*{g}*f*i, "
        f"{_MINE}*(o + {g}*f + {n_into}*i) - n*i, {_MINE}*(o + i))",
    )
    # `n_exchanges` of `operators/experts.py`. If there are two, half of what they take may hide.
    of_both = replace(
        ROWS_AND_EXPERTS,
        function=f"expert_exchange_{name}",
        inner=(
            _GATHERED,
            *(replace(c, size_bytes=f"{c.size_bytes}/parts", count="parts") for c in _EXCHANGED),
        ),
        parts=f"1 + Min(1, floor({_SENT}/{operators.experts.SPLIT_BYTES}))*Min(1, floor(e/2))",
        beside="parts - 1",
        hidden="1/parts",
        arguments=arguments,
        keeps=keeps,
        saved_bytes=f"{_RECEIVED}*(i*item + {g}*f*item + 8) + 8*n",
        forward_bytes=f"item*(Max({_RECEIVED}*(o + Max(f, o)), {_RECEIVED}*(i - {g}*f)) - n*o)",
        # Of two exchanges, the gradients of half of the weights are copied to their place.
        backward_bytes=f"item*Max(Max({_RECEIVED}*(o + {g}*f + 2*f) - e*{g}*f*i, "
        f"{_RECEIVED}*(o + {g}*f + {n_into}*i), 2*{_RECEIVED}*i) - n*i, "
        f"(parts - 1)*(e*f*({g}*i + o)/2 + n*i))",
    )
    return {"e": of_experts, "n e": of_both}


MIXTURE = _mixtures(
    "mlp",
    ("x", "w_in", "w_out", "ids", GROUP, "activation", "transposed", "b_in", "interleaved"),
    ("w_in", "w_out"), "g", 1,
)  # fmt: skip
GATED_MIXTURE = _mixtures(
    "gated_mlp",
    ("x", "w_gate", "w_up", "w_out", "ids", GROUP, "activation", "transposed"),
    ("w_gate", "w_up", "w_out"), "2", 2,
)  # fmt: skip


def _expert_linear(call: OpCall) -> Notation:
    weight = "e i o" if call.args["transposed"] else "e o i"
    return Notation.parse(f"n i, {weight}, n -> n o")


def _expert_mlp(call: OpCall) -> Notation:
    """Both matmuls run where features of rows are whole, so i and o are frozen."""
    transposed = call.args["transposed"]
    made, taken = call.inputs[1][2 if transposed else 1], call.inputs[2][1 if transposed else 2]
    inner = "f" if made == taken else "(f g=2!)" if call.args["interleaved"] else "(g=2! f)"
    weights = f"e i {inner}, e f o!" if transposed else f"e {inner} i, e o! f"
    bias = f", e {inner}" if len(call.inputs) > 4 else ""
    return Notation.parse(f"n i!, {weights}, n{bias} -> n o")


def _expert_gated_mlp(call: OpCall) -> Notation:
    weights = "e i f, e i f, e f o!" if call.args["transposed"] else "e f i, e f i, e o! f"
    return Notation.parse(f"n i!, {weights}, n -> n o")


EXPERT_MATMULS = (
    OpRule(
        str(operators.experts.EXPERT_LINEAR),
        _expert_linear,
        "2*n*i*o",
        linear=((0,), (1,)),
        lower={"e": EXPERTS, "n e": ROWS_AND_EXPERTS},
    ),
    OpRule(
        str(operators.experts.EXPERT_MLP),
        _expert_mlp,
        "2*n*f*(g*i + o)",
        lower=MIXTURE,
        # An activation reads its features and writes as many; a gate reads two and writes one.
        between=("n*f*(g + 1)", "n*f*(3*g - 1)"),
        saves=True,
    ),
    OpRule(
        str(operators.experts.EXPERT_GATED_MLP),
        _expert_gated_mlp,
        "2*n*f*(2*i + o)",
        lower=GATED_MIXTURE,
        between=("n*f*3", "n*f*5"),
        saves=True,
    ),
)
