"""Calls of convolutions, pools, resizing and the norms of images, for the rule oracle."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.samples.rule_samples import Sample, call, fixed, positive, x

# Input, weight [out, in / groups, kernel], None, stride, padding, dilation, groups.
CONV_1D = [
    call(x(4, 8, 5), x(4, 8, 3), None, [2], [1]),
    call(x(2, 4, 6), x(8, 1, 3), None, [1], [2], [2], 4),  # depthwise, two out of each
    call(x(2, 4, 8), x(4, 4, 2), None, [2]),  # tiles
]
CONV_2D = [
    call(x(2, 4, 5, 3), x(8, 4, 3, 2), None, [2, 1], [1, 0], [1, 2]),
    call(x(2, 8, 3, 3), x(8, 2, 2, 2), None, [1, 1], [0, 0], [1, 1], 4),
    call(x(2, 4, 3, 3), x(4, 1, 3, 3), None, [1], [1], [1], 4),  # depthwise
    call(x(2, 3, 8, 4), x(4, 3, 2, 2), None, [2, 2]),  # patches
    call(x(2, 4, 4, 3), x(4, 4, 1, 1)),
    call(x(2, 4, 4, 2), x(4, 4, 1, 1), None, [2]),
    call(x(4, 4, 2), x(4, 4, 1, 2)),  # one image
    call(fixed(2, 4, 4, 2), x(1, 4, 1, 1)),
]
TRANSPOSED_2D = [
    call(x(2, 4, 3, 2), x(4, 4, 3, 2), None, [2, 1], [1, 0], [1, 0]),
    call(x(2, 8, 2, 2), x(8, 2, 2, 2), None, [2, 2], [0, 0], [0, 0], 4),  # tiles, groups
    call(x(4, 4, 4), x(4, 1, 3, 3), None, [2], [1], [1], 4, [2]),
]
SAME = [call(x(2, 4, 5), x(4, 2, 3), None, [1], "same", [2], 2)]
WINDOWS_2D = [
    call(x(2, 4, 5, 4), [3, 2], [2, 1], [1, 0]),
    call(x(4, 4, 8, 4), [2]),  # tiles
    call(x(4, 4, 4), 2, 2),
]
INTO_TWO_2D = [call(x(2, 4, 4, 5), [2, 2]), call(x(4, 4, 4), [1, 1])]


def scaled(rank: int, size: list[int], *options: bool) -> list[Sample]:
    """An upsample to a given size, and by factors; `options` is align_corners where it exists."""
    shape, factors = (2, 4, 3, 4, 2)[:rank], [2.0] * len(size)
    return [
        call(x(*shape), size, *options, None),
        call(x(*shape), None, *options, factors),
    ]


def unpooled(*shape: int) -> Sample:
    """Pooled pairs of the last dim, and where the maxima were."""
    halves, n = (*shape[:-1], shape[-1] // 2), len(shape) - 2
    kernel = [1] * (n - 1) + [2]
    pool = (torch.nn.functional.max_pool2d, torch.nn.functional.max_pool3d)[n - 2]
    indices = pool(fixed(*shape), kernel, return_indices=True)[1]
    where = () if n == 2 else (kernel, [0] * n)
    return call(x(*halves), indices, list(shape[2:]), *where)


def normed(*shape: int) -> list[Any]:
    """An image, and scale, shift, mean and variance of its channels."""
    c = shape[1]
    return [x(*shape), x(c), x(c), fixed(c), positive(c).detach()]


VISION_SAMPLES: dict[str, list[Sample]] = {
    "aten.conv1d.default": CONV_1D,
    "aten.conv2d.default": CONV_2D,
    "aten.conv3d.default": [
        call(x(2, 4, 3, 2, 4), x(4, 2, 2, 2, 1), None, [1, 1, 1], [1, 0, 0], [1, 1, 1], 2),
        call(x(2, 4, 4, 2, 2), x(4, 4, 1, 2, 2), None, [1, 2, 2]),
    ],
    "aten.conv1d.padding": SAME,
    "aten.conv2d.padding": [
        call(x(2, 4, 4, 4), x(8, 4, 2, 2), None, [2, 2], "valid"),
        call(x(2, 4, 4, 3), x(4, 4, 1, 3), None, [1, 1], "same"),
    ],
    "aten.conv3d.padding": [call(x(2, 4, 2, 3, 2), x(4, 4, 1, 2, 1))],
    "aten.conv_transpose1d.default": [
        call(x(2, 4, 3), x(4, 4, 3), None, [2], [1], [1]),
        call(x(2, 4, 4), x(4, 2, 2), None, [2], [0], [0], 2),
    ],
    "aten.conv_transpose2d.input": TRANSPOSED_2D,
    "aten.conv_transpose3d.input": [
        call(x(2, 4, 2, 2, 1), x(4, 2, 2, 1, 1), None, [1], [0], [0], 2)
    ],
    "aten.convolution.default": [
        call(x(2, 4, 5), x(4, 2, 3), None, [2], [1], [1], False, [0], 2),
        call(x(2, 4, 5), x(4, 2, 3), None, [2], [1], [1], True, [1], 2),
    ],
    "aten.max_pool1d.default": [call(x(2, 4, 5), [3], [2], [1]), call(x(4, 8), [2])],
    "aten.max_pool2d.default": [*WINDOWS_2D, call(x(2, 4, 6, 5), [2], [2], [0], [2], True)],
    "aten.max_pool3d.default": [call(x(2, 4, 4, 3, 2), [2, 2, 1], [2, 1, 1])],
    "aten.max_pool1d_with_indices.default": [call(x(2, 4, 8), [2])],
    "aten.max_pool2d_with_indices.default": WINDOWS_2D,
    "aten.max_pool3d_with_indices.default": [call(x(2, 4, 4, 3, 2), [2, 2, 1])],
    "aten.max_unpool2d.default": [unpooled(2, 4, 3, 4)],
    "aten.max_unpool3d.default": [unpooled(2, 4, 1, 3, 4)],
    "aten.avg_pool1d.default": [call(x(2, 4, 5), [3], [2], [1]), call(x(2, 4, 8), [2])],
    "aten.avg_pool2d.default": [*WINDOWS_2D, call(x(2, 4, 5, 4), [2], [2], [1], True, False)],
    "aten.avg_pool3d.default": [call(x(2, 4, 4, 3, 2), [2, 2, 1], [2, 1, 1])],
    **{f"aten.adaptive_{kind}_pool1d.default": [call(x(2, 4, 5), [2])] for kind in ("avg", "max")},
    **{f"aten.adaptive_{kind}_pool2d.default": INTO_TWO_2D for kind in ("avg", "max")},
    **{
        f"aten.adaptive_{kind}_pool3d.default": [call(x(2, 4, 4, 3, 2), [2, 2, 1])]
        for kind in ("avg", "max")
    },
    **{
        f"aten.{name}{n}d.vec": scaled(n + 2, [4, 5, 3][:n])
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for n in (1, 2, 3)
    },
    "aten.upsample_linear1d.vec": scaled(3, [5], False),
    "aten.upsample_trilinear3d.vec": scaled(5, [4, 5, 3], True),
    **{f"aten.upsample_{kind}2d.vec": scaled(4, [5, 3], True) for kind in ("bilinear", "bicubic")},
    **{
        f"aten._upsample_{kind}2d_aa.vec": scaled(4, [2, 3], False)
        for kind in ("bilinear", "bicubic")
    },
    "aten.im2col.default": [
        call(x(2, 4, 4, 5), [2, 3], [1, 1], [0, 1], [2, 1]),
        call(x(4, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]),
    ],
    "aten.col2im.default": [
        call(x(2, 16, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]),
        call(x(8, 9), [3, 4], [1, 2], [1, 1], [0, 0], [1, 1]),
    ],
    "aten.grid_sampler.default": [
        call(x(2, 4, 3, 4), x(2, 4, 2, 2), 0, 0, False),
        call(x(2, 2, 2, 3, 2), x(2, 2, 1, 4, 3), 0, 1, True),
        call(x(4, 1, 3, 4), fixed(4, 2, 2, 2), 1, 2, False),
    ],
    "aten.affine_grid_generator.default": [
        call(x(4, 2, 3), [4, 3, 2, 4], False),
        call(x(4, 3, 4), [4, 1, 2, 2, 2], True),
    ],
    "aten.group_norm.default": [
        call(x(2, 8, 3, 2), 4, x(8), x(8)),
        call(x(4, 4, 2), 1, x(4)),
        call(x(2, 4, 4), 4, x(4), x(4)),
        call(x(4, 8), 2),
    ],
    "aten.batch_norm.default": [
        call(*normed(2, 4, 2, 4), False, 0.1, 1e-5, False),
        call(x(2, 4, 2), None, None, fixed(4), positive(4).detach(), False, 0.1, 1e-5, False),
        call(*normed(4, 8), True, 0.1, 1e-5, False),
        call(x(4, 8, 2), None, None, None, None, True, 0.1, 1e-5, False),
        call(x(8, 4, 3, 2), x(4), x(4), None, None, True, 0.1, 1e-5, False),
        call(fixed(4, 8), x(8), x(8), None, None, True, 0.1, 1e-5, False),  # an input
    ],
    "aten._native_batch_norm_legit_functional.default": [
        call(*normed(4, 8), True, 0.1, 1e-5),
        call(x(2, 4, 3, 2), None, None, fixed(4), positive(4).detach(), True, 0.3, 1e-5),
    ],
    "aten.instance_norm.default": [
        call(x(2, 4, 3, 2), x(4), x(4), None, None, True, 0.1, 1e-5, False),
        call(x(2, 4, 4), None, None, None, None, True, 0.1, 1e-5, False),
        call(*normed(2, 4, 4), False, 0.1, 1e-5, False),
    ],
}
