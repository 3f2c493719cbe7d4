"""Traces the model to one ATen graph, or says which line of the user's code cannot be traced.

`torch.export` (training IR, `strict=False`, no decomposition) keeps `linear`, `layer_norm` and
attention whole and differentiable. With a `loss_fn`, model and loss become one graph.
"""

from __future__ import annotations

import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from autopar import operators
from autopar.capture.findings import Findings
from autopar.capture.names import source_line
from autopar.capture.python_state import (
    CACHE_HINT,
    Calls,
    Observation,
    check_hooks,
    checked_trace,
)
from autopar.capture.trace.checkpointed import regions_marked
from autopar.capture.trace.checks import checks_passed, disable_checks
from autopar.capture.trace.derivatives import (
    DerivativeAskedError,
    Recorded,
    derivatives_traced,
)
from autopar.capture.trace.equal_layers import EqualLayers, layers_of
from autopar.capture.trace.expert_loops import join_loops
from autopar.capture.trace.flex import flex_attention_traced
from autopar.capture.trace.functions import functions_kept
from autopar.capture.trace.grad_modes import GradModes
from autopar.capture.trace.identity import check_identities
from autopar.capture.trace.isolate import fake_copy, fake_inputs, fake_mode
from autopar.capture.trace.kinds import check_kind
from autopar.capture.trace.known import Known
from autopar.capture.trace.layer_copies import UnequalLayersError, write_out
from autopar.capture.trace.quiet import quiet
from autopar.capture.trace.regions import inline_regions
from autopar.capture.trace.replaced import Replaced, targets_in_rows
from autopar.capture.trace.seeds import Seeds
from autopar.capture.trace.transforms import transforms_traced
from autopar.errors import CaptureError, NotSupportedError
from autopar.operators import UnsupportedFunctionError
from autopar.precision import AS_IT_IS, Precision
from autopar.program.graph import AttributeReads

T = TypeVar("T")
LossFn = Callable[[Any, Any], torch.Tensor]

_TORCH = str(Path(torch.__file__).parent)
_OURS = (str(Path(__file__).parents[1]), str(Path(operators.__file__).parent))
_LOOP_HINT = (
    "a loop over all experts without branches that depend on data: one without rows adds nothing "
    "(docs/models.md)"
)
_EXPERTS_HINT = (
    "experts: torch.bmm(weight[ids], x.unsqueeze(-1)), where no matrix is copied per row, "
    f"F.grouped_mm of sorted rows, or {_LOOP_HINT}"
)
_DATA_DEPENDENT_HINT = (
    "use masks and torch.where, so that every shape is known before the step (counts: index_add_ "
    f"for bincount; {_EXPERTS_HINT}); what never changes, such as a graph, may be a buffer"
)
# Errors whose own words are about the tracer -> what they mean.
_MEANINGS = {"GuardOnDataDependent": "what runs depends on the values of a tensor"}
# Refusals that values of constants may lift.
_OF_VALUES: tuple[tuple[str, str], ...] = (
    (
        "GuardOnDataDependent",
        "a branch depends on tensor values; use torch.where or tensor arithmetic instead, a "
        f"buffer for what never changes, or {_LOOP_HINT}",
    ),
    ("DynamicOutputShape", _DATA_DEPENDENT_HINT),
    ("PendingUnbackedSymbol", _DATA_DEPENDENT_HINT),
    (
        "DataDependentOutput",
        "a Python number is read from a tensor; keep the computation in tensors "
        "(x.index_select(0, i) for x[i])",
    ),
)
_HINTS: tuple[tuple[str, str], ...] = (
    *_OF_VALUES,
    ("TypeError", "check that model(**example_inputs) runs without autopar"),
)
# What the error says -> what to write.
_HINTS_OF_WORDS: tuple[tuple[str, str], ...] = (
    (r"\bu\d+\b", _DATA_DEPENDENT_HINT),  # as torch names a size that depends on data
    (r"BF16 type but got mat_a", _EXPERTS_HINT),  # of `F.grouped_mm`, when it is traced
    (
        r"\.numpy\(\)",
        "values leave torch for NumPy (a matching by SciPy, a metric): compute them in torch, or "
        "before the step, as an input",
    ),
)
# Parts of torch that the trace was in -> what to write.
_HINTS_OF_FILES: tuple[tuple[str, str], ...] = (
    (
        "torch/distributions/",
        "the checks of a distribution depend on values: Categorical(..., validate_args=False)",
    ),
)
_DEFAULT_HINT = "check that the model runs on these inputs without autopar"
_SIDE_EFFECT = "was assigned during export"
_LOSS_NOTE = "loss_fn gets (outputs, batch)"


class Traced(NamedTuple):
    """A trace, and its graph without regions; which attributes of modules it read, and which
    buffers for their values; how many layers were copied instead of traced."""

    exported: ExportedProgram
    graph: fx.Graph
    reads: AttributeReads
    buffers: tuple[str, ...]
    n_copies: int


class WithLoss(nn.Module):
    """`(loss_fn(outputs, batch), outputs)` in one graph.

    The batch may hold tensors that only the loss reads. The model gets what its forward accepts.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model = model
        # In a tuple, so that a loss that is a module does not become a submodule here.
        self._loss_fn = (loss_fn,)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        model_args, model_kwargs = accepted(self.model, args, kwargs)
        outputs = self.model(*model_args, **model_kwargs)
        batch = kwargs if kwargs else args
        try:
            return self._loss_fn[0](outputs, batch), outputs
        except (TypeError, LookupError, AttributeError) as error:
            kind = type(batch).__name__
            error.add_note(f"{_LOSS_NOTE}; batch is the {kind} of example_inputs")
            raise


def accepted(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The part of the batch that `model.forward` has parameters for."""
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = [p.kind for p in parameters]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        positional = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        args = args[: sum(kind in positional for kind in kinds)]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        names = {p.name for p in parameters}
        kwargs = {name: value for name, value in kwargs.items() if name in names}
    return args, kwargs


def export_model(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    findings: Findings,
    *,
    training: bool,
    loss_fn: LossFn | None,
    modes: Mapping[str, bool] | None = None,
    precision: Precision = AS_IT_IS,
    layers_once: bool = True,
) -> Traced:
    """Trace a fake copy of `model`; also returns what the trace read of it as constants.

    modes        the training mode of each module, by path; None: those that the model has
    layers_once  equal layers are traced once (`equal_layers.py`): the same graph, sooner

    Raises `CaptureError` if the model cannot be one static graph: control flow or shapes depend
    on data, forward assigns tensors to attributes or changes Python values that it reads, or the
    model itself raises an error. Raises `NotSupportedError` for a hook that would never run, and
    for an `autograd.Function` that is more than a function of its tensors, and for TorchScript.
    """
    check_kind(model)
    check_hooks(model, findings, training)
    derivatives = constants = False
    layers_once = layers_once and bool(layers_of(model))
    while True:
        try:
            return _traced(
                model, example_inputs, findings, training, loss_fn, modes, precision,
                derivatives, constants, layers_once,
            )  # fmt: skip
        except DerivativeAskedError:
            derivatives, layers_once = True, False
        except UnequalLayersError:
            layers_once = False
        except CaptureError as error:
            if layers_once:  # it may come of that
                layers_once = False
                continue
            if constants or error.hint not in {hint for _, hint in _OF_VALUES}:
                raise
            constants = True


def _traced(
    model: nn.Module, example_inputs: Mapping[str, Any] | Sequence[Any], findings: Findings,
    training: bool, loss_fn: LossFn | None, modes: Mapping[str, bool] | None,
    precision: Precision, derivatives: bool, constants: bool, layers_once: bool,
) -> Traced:  # fmt: skip
    """One try; forward may ask for derivatives, and for values of constants, if they are True.

    `layers_once`: equal layers are traced once. Raises `UnequalLayersError` if that was wrong.
    """
    mode = fake_mode()
    twin = fake_copy(model, mode, training, modes, precision)
    args, kwargs = fake_inputs(mode, example_inputs)
    target: nn.Module = twin
    if loss_fn is not None:
        target = WithLoss(twin, loss_fn)
        target.training = twin.training  # not `train()`, which would set all modules
    known = Known(model, twin) if constants else None

    def traced(run: Callable[[Observation], T], state: Observation) -> tuple[T, list[object]]:
        """The result of something that runs forward of `target`, and what that called of torch."""
        check_identities(model, state)
        recorded, calls = Recorded() if derivatives else None, Calls()
        with warnings.catch_warnings(record=True) as caught, quiet():
            warnings.simplefilter("always")
            try:
                with (
                    torch.set_grad_enabled(training or torch.is_grad_enabled()),
                    functions_kept(),
                    regions_marked(),
                    checks_passed(findings),
                    derivatives_traced(recorded),
                    transforms_traced(),
                    flex_attention_traced(),
                    _entered_in_forward(
                        target, Seeds(), recorded, GradModes(), Replaced(), known, calls
                    ),
                    precision.autocast(),
                ):
                    made = run(state)
            except DerivativeAskedError:
                raise
            except NotSupportedError as error:
                where = error.where or _user_line(error)
                raise NotSupportedError(error.what, where=where, hint=error.hint) from error
            except UnsupportedFunctionError as error:
                where = _user_line(error)
                raise NotSupportedError(str(error), where=where, hint=error.hint) from error
            except Exception as error:
                raise _export_error(model, error) from error
        _check_side_effects(model, caught)
        return made, calls.lines

    def export(state: Observation) -> tuple[ExportedProgram, EqualLayers]:
        layers = EqualLayers(twin, "" if loss_fn is None else "model.", state, findings)
        with layers.called() if layers_once else nullcontext():
            return torch.export.export(target, args, kwargs, strict=False), layers

    def forward(_: Observation) -> None:
        with mode:
            target(*args, **kwargs)

    (exported, layers), reads = checked_trace(
        model, twin, loss_fn, partial(traced, export), partial(traced, forward)
    )
    for module in exported.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            if loss_fn is not None:
                _point_to_loss(module.graph, loss_fn)
            targets_in_rows(module.graph)
            disable_checks(module.graph)
    graph = inline_regions(exported.graph_module)
    join_loops(graph)
    write_out(graph, exported, layers)
    _check_static(model, graph)
    return Traced(
        exported, graph, reads, tuple(sorted(known.buffers)) if known else (), layers.n_copies
    )


@contextmanager
def _entered_in_forward(
    target: nn.Module, *modes: AbstractContextManager[Any] | None
) -> Iterator[None]:
    """Modes that hold while forward of `target` runs, above the fake tensors of the trace."""
    inside = ExitStack()

    def enter(*_: Any) -> None:
        for mode in modes:
            if mode is not None:
                inside.enter_context(mode)

    before = target.register_forward_pre_hook(enter, prepend=True)
    after = target.register_forward_hook(lambda *_: inside.close(), always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()
        inside.close()


def _point_to_loss(graph: torch.fx.Graph, loss_fn: LossFn) -> None:
    """Give nodes of the loss the line where the loss is defined.

    Traces keep only frames of `forward`, so these nodes would show the wrapper above.
    """
    code = getattr(inspect.unwrap(loss_fn), "__code__", None)
    if code is None:  # a module or a partial: keep the frames it has
        return
    here = f'File "{__file__}"'
    for node in graph.nodes:
        trace = node.meta.get("stack_trace") or ""
        frames = [line for line in trace.splitlines() if line.lstrip().startswith("File ")]
        if frames and frames[-1].lstrip().startswith(here):
            node.meta["stack_trace"] = (
                f'File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}'
            )


def _export_error(model: nn.Module, error: Exception) -> CaptureError:
    names = " ".join(c.__name__ for c in type(error).__mro__)
    words = (text for pattern, text in _HINTS_OF_WORDS if re.search(pattern, str(error)))
    hint = next((text for key, text in _HINTS if key in names), next(words, _DEFAULT_HINT))
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    hint = next((text for part, text in _HINTS_OF_FILES if any(part in f for f in files)), hint)
    notes = getattr(error, "__notes__", ())
    hint = next((note for note in notes if note.startswith(_LOSS_NOTE)), hint)
    first_line = next((line for line in str(error).splitlines() if line.strip()), "")
    reason = f"{type(error).__name__}: {first_line.strip()}" if first_line else repr(error)
    reason = next((text for key, text in _MEANINGS.items() if key in names), reason)
    return CaptureError(
        f"cannot trace {type(model).__name__} into one graph: {reason}",
        where=_user_line(error),
        hint=hint,
    )


def _user_line(error: Exception) -> str | None:
    """`file:line` of the innermost frame that is neither torch's nor ours."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_TORCH, *_OURS, "<"))
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def _check_side_effects(model: nn.Module, caught: list[warnings.WarningMessage]) -> None:
    for warning in caught:
        text = str(warning.message)
        if _SIDE_EFFECT in text:
            raise CaptureError(
                f"{type(model).__name__} changes itself in forward: {text.split('. ')[0]}",
                hint=f"return the tensor instead of keeping it in an attribute; {CACHE_HINT}",
            )


def _check_static(model: nn.Module, graph: torch.fx.Graph) -> None:
    """Refuse shapes and numbers that depend on the data (`x[mask]`, `.item()`)."""
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
            if isinstance(value, torch.Tensor):
                symbolic = any(isinstance(size, torch.SymInt) for size in value.shape)
            if symbolic:
                raise CaptureError(
                    f"{type(model).__name__}: the result of `{node.target}` depends on the data "
                    "in its shape or as a Python number",
                    where=source_line(node),
                    hint=_DATA_DEPENDENT_HINT,
                )
