"""Rules of convolutions, pools, resizing and the norms of images. Spatial dims come last.

    convolution      b (g i) x!, (g o) i k! -> b (g o) y!         groups g; i is summed over
    transposed       b (g i) y!, (g i) o k! -> b (g o) x!
    pool, resize     ... x! -> ... y!
    group norm       b (g e!) s!, (g e!), (g e!) -> b (g e!) s!   num_groups g

x, y, k and s stand for one name per spatial dim. Spatial dims are frozen, because windows that
overlap would need rows of other shards. The exception is windows that are tiles: stride = kernel,
no padding, no dilation. Then x = (y k!), and y may be sharded: the patches of a vision transformer,
and every convolution with kernel and stride 1.

`groups` is localised: it follows from a rank's channels and its weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.placement import Notation, Term
from autopar.rules.families import named_term, names
from autopar.rules.lowering import BATCH_NORM
from autopar.rules.rule import Family, LinearSets, OpCall, OpRule, Shape

ALONE: LinearSets = ((0,),)


def _per_dim(value: Any, n: int) -> list[Any]:
    """A window argument per spatial dim; it may be given once for all."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * n if len(values) == 1 else values


def _tiles(call: OpCall, kernel: Sequence[int], whole: Shape, stride: Any) -> list[bool]:
    """Per spatial dim: do windows of `kernel` cut `whole` into equal tiles?"""
    padding = call.args.get("padding", 0)
    padding = 0 if isinstance(padding, str) else padding  # `same` has stride 1
    others = (stride, padding, call.args.get("output_padding", 0), call.args.get("dilation", 1))
    columns = zip(kernel, whole, *(_per_dim(v, len(kernel)) for v in others), strict=True)
    return [
        step == k and size % k == 0 and not (before or after) and (gap == 1 or k == 1)
        for k, size, step, before, after, gap in columns
    ]


def _windows(tiles: Sequence[bool]) -> tuple[Term, Term, Term, frozenset[str]]:
    """Spatial terms of image, windows and kernel; and the names that may not be sharded."""
    x, y, k = (names(len(tiles), prefix) for prefix in ("x", "_y", "_k"))
    whole = tuple((y[i], k[i]) if tile else (x[i],) for i, tile in enumerate(tiles))
    held = {name for i, tile in enumerate(tiles) if not tile for name in (x[i], y[i])}
    return whole, tuple((i,) for i in y), tuple((i,) for i in k), frozenset({*k, *held})


def _is_transposed(call: OpCall) -> bool:
    return bool(call.args.get("transposed", "transpose" in call.op.name()))


def convolution(call: OpCall) -> Notation:
    """All names but `x` count in FLOPs.

    There is one multiply-add for each window, kernel element, input channel and output channel of a
    group.
    """
    (source, kernel), out = call.inputs, call.outputs[0]
    n, transposed = len(kernel) - 2, _is_transposed(call)
    whole = (out if transposed else source)[-n:]
    tiles = _tiles(call, kernel[2:], whole, call.args["stride"])
    x, y, k, frozen = _windows(tiles)
    batch = named_term(source[: -n - 1], ("_b",)[: len(source) - n - 1])
    into, outof = ("_g", "_i"), ("_g", "_o")
    weight: Term = (into, ("_o",), *k) if transposed else (outof, ("_i",), *k)
    before, after = (y, x) if transposed else (x, y)
    return Notation(((*batch, into, *before), weight), ((*batch, outof, *after),), frozen)


def _localise_groups(
    call: OpCall, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> dict[str, Any]:
    """The weight's dim 1 is the channels of one group: input channels, or output if transposed."""
    kernel = inputs[1]
    grouped = outputs[0] if _is_transposed(call) else inputs[0]
    return {"groups": grouped[1 - len(kernel)] // kernel[1]}


def _no_bias(call: OpCall) -> str | None:
    return "a bias inside a convolution\nadd it to the result" if len(call.inputs) > 2 else None


def trailing(n: int) -> Family:
    """The last `n` dims stay whole; the others are those of the input."""

    def notation(call: OpCall) -> Notation:
        held: set[str] = set()

        def term(shape: Shape, prefix: str) -> Term:
            labels = (*names(len(shape) - n), *names(n, prefix))
            held.update(labels[-n:])
            return named_term(shape, labels)

        inputs = tuple(term(shape, f"x{i}_") for i, shape in enumerate(call.inputs))
        outputs = tuple(term(shape, "y") for shape in call.outputs)
        return Notation(inputs, outputs, frozenset(held))

    return notation


def pooled(n: int) -> Family:
    """Windows over the last `n` dims, which may be tiles."""

    def notation(call: OpCall) -> Notation:
        shape, kernel = call.inputs[0], _per_dim(call.args["kernel_size"], n)
        # An empty stride means the kernel size.
        tiles = _tiles(call, kernel, shape[-n:], call.args["stride"] or kernel)
        x, y, _, frozen = _windows(tiles)
        lead = named_term(shape[:-n], names(len(shape) - n))
        return Notation(((*lead, *x),), ((*lead, *y),), frozen)

    return notation


def group_norm(call: OpCall) -> Notation:
    """Channels are groups x channels per group; the latter stay whole."""
    shape = call.inputs[0]
    rest = names(len(shape) - 2, "s")
    channels = ("g", "e")
    term = (*named_term(shape[:1], ("b",)), channels, *named_term(shape[2:], rest))
    sizes = frozenset({("g", int(call.args["num_groups"]))})
    affine = ((channels,),) * (len(call.inputs) - 1)
    return Notation((term, *affine), (term,), frozenset({"e", *rest}), sizes)


def _localise_num_groups(
    call: OpCall, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> dict[str, Any]:
    channels = call.inputs[0][1]
    return {"num_groups": call.args["num_groups"] * inputs[0][1] // channels}


def _channelwise(call: OpCall, held: Sequence[str], batch: str = "b") -> Notation:
    """The notation of [b c ...] with weight, bias and statistics per channel."""
    shape = call.inputs[0]
    labels = (batch, "c", *names(len(shape) - 2, "_"))
    term = named_term(shape, labels)
    per_channel = tuple(named_term(s, ("c",)) for s in call.inputs[1:])
    return Notation((term, *per_channel), (term,), frozenset(held))


def batch_norm(call: OpCall) -> Notation:
    """Batch norm. With given statistics it is elementwise.

    In training, statistics are over all dims but the channels, so spatial dims stay whole. The
    batch is named `n` and may be sharded by a lowering.
    """
    if not call.args["training"]:
        return _channelwise(call, ())
    return _channelwise(call, names(len(call.inputs[0]) - 2, "_"), batch="n")


def instance_norm(call: OpCall) -> Notation:
    """Instance norm: statistics of each row and channel, or given ones."""
    spatial = names(len(call.inputs[0]) - 2, "_")
    return _channelwise(call, spatial if call.args["use_input_stats"] else ())


def _updates_nothing(call: OpCall) -> str | None:
    if call.args["use_input_stats"] and call.args["running_mean"] is not None:
        return (
            "an instance norm in training that keeps running statistics is not supported\n"
            "use track_running_stats=False, or put the module in eval mode"
        )
    return None


def patches(call: OpCall) -> Notation:
    """`im2col`, [... c h w] -> [... (c k) l], and its inverse `col2im`."""
    n_leading = len(call.outputs[0]) - 3 if "output_size" in call.args else len(call.inputs[0]) - 3
    lead = named_term(call.inputs[0][:n_leading], names(n_leading))
    image: Term = (*lead, ("c",), ("h",), ("w",))
    columns: Term = (*lead, ("c", "k"), ("l",))
    before, after = (columns, image) if "output_size" in call.args else (image, columns)
    return Notation((before,), (after,), frozenset({"k", "l", "h", "w"}))


def grid_sample(call: OpCall) -> Notation:
    """Pixels of an image at the points of a grid: `b c x!, b y 2 -> b c y`."""
    image, grid = call.inputs
    n = len(image) - 2
    labels, points = ("b", "c", *names(n, "x")), names(n, "y")
    return Notation(
        (named_term(image, labels), named_term(grid, ("b", *points, "at"))),
        (named_term(call.outputs[0], ("b", "c", *points)),),
        frozenset({"at", *labels[2:]}),
    )


def affine_grid(call: OpCall) -> Notation:
    """One grid of points per matrix: only the batch may be sharded."""
    matrix, grid = names(2, "m"), names(len(call.outputs[0]) - 1, "y")
    return Notation(
        (named_term(call.inputs[0], ("b", *matrix)),),
        (named_term(call.outputs[0], ("b", *grid)),),
        frozenset({*matrix, *grid}),
    )


def _localise_batch(
    call: OpCall, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> dict[str, Any]:
    return {"size": [outputs[0][0], *call.args["size"][1:]]}


def _convolution(name: str) -> OpRule:
    return OpRule(
        f"aten.{name}",
        convolution,
        "2",
        linear=((0,), (1,)),
        localise=_localise_groups,
        check=_no_bias,
    )


CONVOLUTIONS = tuple(
    _convolution(name)
    for name in (
        *(f"conv{n}d.{overload}" for n in (1, 2, 3) for overload in ("default", "padding")),
        *("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input"),
        "convolution.default",
    )
)

POOLS = tuple(
    rule
    for n in (1, 2, 3)
    for rule in (
        OpRule(f"aten.max_pool{n}d.default", pooled(n)),
        OpRule(f"aten.avg_pool{n}d.default", pooled(n), linear=ALONE),
        # The indices are positions in the whole image, so spatial dims stay whole.
        OpRule(f"aten.max_pool{n}d_with_indices.default", trailing(n)),
        OpRule(f"aten.adaptive_max_pool{n}d.default", trailing(n)),
        OpRule(f"aten.adaptive_avg_pool{n}d.default", trailing(n), linear=ALONE),
        *([OpRule(f"aten.max_unpool{n}d.default", trailing(n), linear=ALONE)] if n > 1 else []),
    )
)

_UPSAMPLES = (
    *((f"upsample_nearest{n}d", n) for n in (1, 2, 3)),
    *((f"_upsample_nearest_exact{n}d", n) for n in (1, 2, 3)),
    *(("upsample_linear1d", 1), ("upsample_trilinear3d", 3)),
    *((name, 2) for name in ("upsample_bilinear2d", "upsample_bicubic2d")),
    *((name, 2) for name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")),
)
REARRANGED = (
    *(OpRule(f"aten.{name}.vec", trailing(n), linear=ALONE) for name, n in _UPSAMPLES),
    OpRule("aten.im2col.default", patches, linear=ALONE),
    OpRule("aten.col2im.default", patches, linear=ALONE),
    OpRule("aten.grid_sampler.default", grid_sample, linear=ALONE),
    OpRule(
        "aten.affine_grid_generator.default",
        affine_grid,
        linear=ALONE,
        localise=_localise_batch,
    ),
)
NORMS = (
    OpRule("aten.group_norm.default", group_norm, localise=_localise_num_groups),
    OpRule("aten.batch_norm.default", batch_norm, lower={"n": BATCH_NORM}),
    OpRule("aten.instance_norm.default", instance_norm, check=_updates_nothing),
)

CONVOLUTIONAL = (*CONVOLUTIONS, *POOLS, *REARRANGED, *NORMS)
