"""What programs are drawn from: families of statements, each a table of templates, with a weight.

A hole is a value or a size (`draw.py`); the first value is the main one, which sizes are of:

    $a real   $b of its shape   $c broadcast to it   $r any   $A may be written   $i ints   $m bools
    $z complex   $f rows of the batch   $g images   $video   $S a list of states, $j a place in it
    $d $e dims   $N size of $d   $half   $H $L $C $B sizes   $W a width   $k 1 to 3   $s a number

`{nn.Linear($H, $W)}` is a part of the module, new or an earlier one. `!` is a statement that is no
expression; it gives values to NEW_v. A template that torch refuses for the values drawn is drawn
again, so tables need not say what fits.
"""

from __future__ import annotations

from tests.fuzz.programs.losses import LOSSES as LOSSES
from tests.fuzz.programs.losses import RETURNS as RETURNS
from tests.fuzz.programs.modules import (
    ATTENTION,
    CONVOLUTIONS,
    IMAGES,
    LAYERS,
    NORMS,
    PRODUCTS,
    RANDOM,
    RECURRENT,
    STATE,
)
from tests.fuzz.programs.values import (
    BAGS,
    BINARY,
    BOOLEANS,
    COMPLEX,
    DERIVATIVES,
    FACTORIES,
    FUNCTIONS,
    IN_PLACE,
    INTEGERS,
    JOINED,
    MATRICES,
    PLACES,
    REDUCTIONS,
    SCANS,
    UNARY,
    VIEWS,
)

Table = tuple[str, ...]

FAMILIES: tuple[tuple[float, Table], ...] = (
    (3, UNARY), (5, BINARY), (2.5, IN_PLACE), (3, REDUCTIONS), (1.5, SCANS), (5, VIEWS),
    (3, JOINED), (1, BOOLEANS), (1.5, INTEGERS), (1.2, COMPLEX), (2, PLACES), (0.8, MATRICES),
    (0.8, FACTORIES), (0.5, FUNCTIONS), (0.5, BAGS), (0.6, DERIVATIVES), (5, LAYERS),
    (1.5, PRODUCTS), (1.5, ATTENTION), (2, NORMS), (1.5, CONVOLUTIONS), (1.5, IMAGES), (1, RANDOM),
    (0.3, RECURRENT), (0.8, STATE),
)  # fmt: skip

# What a program begins with: inputs meet weights.
FIRST: tuple[tuple[float, Table], ...] = (
    (4, ("{nn.Linear($H, $W)}($f)", "{nn.Linear($H, 4)}($f)", "{nn.Embedding(8, $W)}($i)")),
    (1, ("{nn.Conv2d($C, 4, 3, padding=1)}($g)",)),
    (1, ("{nn.Conv3d($C, 2, 3, padding=1)}($video)",)),
    (1, ("$f * {nn.Parameter(torch.randn($L, $H) * 0.3)}",)),
)

# Views of a value; those of its shape.
VIEWS_OF: Table = (
    ".transpose($d, $e)", ".mT", ".flip($d)", ".narrow($d, 0, $half)", ".chunk(2, $d)[0]",
    ".chunk(2, $d)[1]", "[:, 1:]", "[..., ::2]", "[..., :-1]", "[:, -1]", ".select($d, 0)",
    ".unsqueeze($d)", ".unflatten($d, (2, -1))", ".flatten(1)", ".contiguous()", ".roll(1, $d)",
    ".unsqueeze(1).expand(-1, 2, *$shape[1:])", ".movedim($d, $e)", ".diagonal(0, 1, 2)",
    ".detach()", ".unbind($d)[-1]",
)  # fmt: skip
SAME_SHAPE: Table = (
    "", ".transpose($d, $e)", ".transpose(1, 2)", ".mT", ".flip($d)", ".roll(1, $d)",
    ".reshape($shape)", ".transpose($d, $e).reshape($shape)", "[:, :1].expand($shape)",
    "[..., :1].expand($shape)", ".view($shape)", ".contiguous()", ".clone()", ".detach()",
    ".narrow($d, 0, 1).expand($shape)", ".flatten(1).view($shape)", ".movedim($d, $e)",
)  # fmt: skip
COMPLEX_VIEWS: Table = (".transpose($d, $e)", ".conj()", ".flip($d)", "[:, 1:]", ".unsqueeze($d)")

# Loops over copies of a block: states kept in a list, states of one loop read by another from its
# end (a U-net), states summed up, some blocks checkpointed.
LOOPS: Table = (
    "NEW_v, NEW_s = $h, []\nfor block in $blocks:\n    NEW_v = block(NEW_v$extra)\n"
    "    NEW_s.append(NEW_v)",
    "NEW_v, NEW_s = $h, [$h]\nfor i, block in enumerate($blocks):\n"
    "    if i % 2 == 1:\n        NEW_s.append(NEW_v)\n    NEW_v = block(NEW_v$extra)",
    "NEW_v, NEW_s = $h, []\nfor block in $blocks:\n"
    "    NEW_v = checkpoint(block, NEW_v$extra, use_reentrant=False)\n    NEW_s.append(NEW_v)",
    "NEW_v, NEW_s = $h, [$h]\nfor block in $blocks:\n    NEW_v = block(NEW_v$extra) + NEW_s[0]\n"
    "    NEW_s.append(NEW_v)",
    "NEW_v, NEW_s = $h, [$h]\nfor block in $blocks:\n"
    "    NEW_v = block(sum(NEW_s[-2:])$extra)\n    NEW_s.append(NEW_v)",
    "NEW_v, NEW_s = $h, []\nfor block, scale in zip($blocks, "
    "{nn.ParameterList(torch.tensor(1 + k / 10) for k in range($n))}):\n"
    "    NEW_v = block(NEW_v * scale$extra)\n    NEW_s.append(NEW_v)",
    # Parameters of lists beside the blocks: one by name and one from the end, and two of one list.
    "NEW_v, NEW_s = $h, []\ngates = "
    "{nn.ParameterDict([(str(k), torch.tensor(1 - k / 20)) for k in range($n)])}\nscales = "
    "{nn.ParameterList(torch.tensor(1 + k / 20) for k in range($n))}\n"
    "for i, block in enumerate($blocks):\n"
    "    NEW_v = NEW_v * scales[-1 - i] + block(NEW_v$extra) * gates[str(i)]\n"
    "    NEW_s.append(NEW_v)",
    "NEW_v, NEW_s = $h, []\npairs = "
    "{nn.ParameterList(torch.tensor(1 + k / 20) for k in range(2 * $n))}\n"
    "for i, block in enumerate($blocks):\n"
    "    NEW_v = NEW_v * pairs[2 * i] + block(NEW_v$extra) * pairs[2 * i + 1]\n"
    "    NEW_s.append(NEW_v)",
)
# What reads the states of a loop.
BLOCK_LINES: Table = (
    "$S[$j]", "$S[$j] + $S[$j].mT", "torch.stack($S).mean(0)", "torch.cat($S[-2:], -1)",
    "sum($S) / len($S)", "$S[$j].detach() * 0.5 + $S[-1]", "$S[0] + $S[-1]", "$S[$j].square()",
    "torch.stack($S[-2:], 1)", "$S[$j].transpose(1, 2)",
)  # fmt: skip
