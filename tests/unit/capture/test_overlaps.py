"""Elements that tensors of one storage have in common, beside every element's place."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.capture.overlaps import are_one_view, overlaps_itself, share_elements


@st.composite
def views(draw: st.DrawFn, of: Tensor) -> Tensor:
    """Slices, steps, transposes, windows and expands of a tensor."""
    view = of.view(draw(st.sampled_from([(24,), (4, 6), (2, 3, 4)])))
    for _ in range(draw(st.integers(0, 3))):
        dim = draw(st.integers(0, view.dim() - 1))
        start = draw(st.integers(0, view.shape[dim]))
        match draw(st.sampled_from(["slice", "turn", "window", "expand"])):
            case "slice":
                view = view.movedim(dim, 0)[start :: draw(st.integers(1, 3))].movedim(0, dim)
            case "turn":
                view = view.movedim(dim, 0)
            case "window" if view.shape[dim] >= 2 and view.dim() < 4:
                view = view.unfold(dim, 2, 1)
            case "expand" if view.dim() < 4:
                view = view.unsqueeze(0).expand(2, *view.shape)
    return view


def places(view: Tensor) -> list[int]:
    return [int(k) for k in view.flatten()]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_what_two_views_share(data: Any) -> None:
    storage = torch.arange(24)
    a, b = data.draw(views(storage)), data.draw(views(storage))
    assert share_elements(a, b) == bool(set(places(a)) & set(places(b)))
    if len(set(places(a))) < a.numel():
        assert overlaps_itself(a)
    try:
        beside = b.expand(a.shape)
    except RuntimeError:
        return
    if a.numel():
        assert are_one_view(a, b) == torch.equal(a, beside)
