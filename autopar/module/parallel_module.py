"""The parallel module: the `nn.Module` that `autopar.parallelize` returns.

Every rank captures the graph, and rank 0 plans. The other ranks take rank 0's plan as data, check
the hash of their graph and place the plan on it. Parameters are whole tensors under the user's
names, of which the rank keeps a shard. Every other input shape, and evaluation, is a program of its
own over the same shards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture import check_kind
from autopar.errors import (
    BatchError,
    NotPlannedError,
    NotSupportedError,
    OptionError,
)
from autopar.mesh import Mesh
from autopar.module.agreement import (
    Agreement,
    Fingerprint,
    Given,
    agreed_program,
    compare_settings,
)
from autopar.module.batches import Loaded, unwrapped
from autopar.module.calls import (
    ONE,
    check_autocast,
    check_options,
    check_planning_mode,
    check_step_mode,
    one_dict,
    one_form,
    weight_of,
)
from autopar.module.compiling import settle_compile
from autopar.module.feeding import Feeding
from autopar.module.finite import Guard, SkippedIfBad, Unguarded
from autopar.module.habits import (
    ForwardLoss,
    PlannedModule,
    StepLoss,
    keep_from_dynamo,
    refuse_export,
    warn_of_seed,
)
from autopar.module.job import from_rank_0, join_process_group, own_rank
from autopar.module.layers import Holders, Shown
from autopar.module.optimizers import call_before_steps, watch_optimizers
from autopar.module.originals import warn_of_shared
from autopar.module.parameters import StepGradients
from autopar.module.planned_state import PlannedState
from autopar.module.programs import Built, Kind, keys_of_model, warn_of_unread
from autopar.module.surface import Surface, tell_capture
from autopar.options import Options
from autopar.passes.binding import (
    check_mesh,
    example_of,
    has_nested_inputs,
)
from autopar.passes.compilation import Compilation
from autopar.passes.facts import Source, Target
from autopar.passes.pipeline import PASSES
from autopar.planning import Plan, settled_heap
from autopar.plans import PlanData
from autopar.program.graph import Audit, Program, flatten_inputs
from autopar.runtime.execute import require_compiler
from autopar.runtime.state import LossScale, all_names


class ParallelModule(PlannedModule, Feeding, Surface):
    """A model sharded by a plan. Make it with `autopar.parallelize`."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, options: Options, weights: str, brings: str
    ) -> None:
        super().__init__()
        check_planning_mode()
        check_kind(model)
        self._model = (model,)  # a tuple, so that it is not a submodule
        self._mesh, self._options, self._weights = mesh, options, weights
        self._device = join_process_group(mesh)
        if options.compiles:
            require_compiler(self._device, options.compile)
        compare_settings(mesh, options, weights, brings, self._device)
        self._agreement = Agreement(self._device, options.check_every)
        self._state_or_none: PlannedState | None = None
        self.training = model.training

    @property
    def code_path(self) -> Path:
        """The generated file of this rank's stage of the planned program."""
        return self._state.programs.variants.first.code_path

    def captured(self) -> Audit:
        """What capture made of the model, for training: frozen, kept, replaced, refused."""
        return self._state.bound.analysis.program.audit

    def prepare(self, *args: Any, **kwargs: Any) -> ParallelModule:
        """Plan for a batch like this one, unless there is a plan. Returns self."""
        if self._state_or_none is None:
            self._make_plan(one_form(args, kwargs))
        return self

    def _make_plan(self, batch: Mapping[str, Any] | Sequence[Any]) -> None:
        check_autocast(self._device)
        self._agreement.check("plan", batch)
        compilation = self._compilation(batch)

        @settled_heap()
        def on_rank_0() -> PlanData:
            return compilation[PlanData]

        self._adopt(from_rank_0(on_rank_0), compilation)

    def _use_plan(self, plan: Plan, batch: Mapping[str, Any] | Sequence[Any] | None = None) -> None:
        """Use rank 0's plan; `batch` is needed if the plan has nested inputs."""
        data = from_rank_0(lambda: plan.data)
        check_mesh(data, self._mesh)
        example = batch if has_nested_inputs(data) and batch is not None else example_of(data)
        self._adopt(data, self._compilation(example))

    def _compilation(self, batch: Mapping[str, Any] | Sequence[Any]) -> Compilation:
        """The captured model; every rank captures, so that each reports its own error."""
        given = Source(self._model[0], batch), Target(self._mesh, self._options, self._device.type)
        compilation = Compilation(PASSES, *given)
        program = agreed_program(compilation[Program], self._weights, self._device)
        return (
            compilation if program is compilation[Program] else Compilation(PASSES, *given, program)
        )

    def _adopt(self, data: PlanData, compilation: Compilation) -> None:
        """Adopt rank 0's plan: rank 0 keeps its facts, the others place the plan."""
        if PlanData not in compilation:
            compilation.give(data)
        self._options = settle_compile(self._options, compilation, self._device)
        model, program = self._model[0], compilation[Program]
        if self._options.loss_fn is not None:
            warn_of_unread(program, model, compilation[Source].example_inputs)
        self._state_or_none = PlannedState.adopted(
            model, self._options, self._weights, self._device, data, compilation
        )
        if own_rank() == 0:
            warn_of_shared(model, self)
        watch_optimizers(model)
        keep_from_dynamo(type(self))
        self._connect(LossScale())
        tell_capture(program)

    def _connect(self, scale: LossScale | None) -> None:
        """Hear of steps of optimizers, and show the layers; what is planned is there."""
        self._scale_losses(scale)
        parameters = self._state.stored.parameters.values()
        call_before_steps(parameters, self, type(self)._prepare_optimizer)
        self._show_layers()

    def _prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of these parameters steps: what all ranks must agree on before it does."""
        held = self._state
        held.hyperparameters.check(optimizer)
        held.originals.warn_of_gradients()
        if held.scaler is not None:
            held.scaler.decide()
        else:
            held.finite.before_optimizer(held.shards)

    def _show_layers(self) -> None:
        """Show the model's layers (`layers.py`), with this rank's parameters and buffers."""
        held, stored = self._state, self._state.stored
        parameters = {
            n: stored.parameters[p.name] for p in held.place.parameters for n in all_names(p)
        }
        shown = Shown(self._model[0], parameters, stored.buffers)
        self._parameters |= shown.root_parameters
        self._buffers |= shown.root_buffers
        self._non_persistent_buffers_set |= stored.not_saved & shown.root_buffers.keys()
        self._modules |= shown.children
        held.layers = {name: m for name, m in self.named_modules() if name}
        held.holders = Holders(self)

    def _program(self, batch: Given, kind: Kind) -> Built:
        """The compiled program for the current mode and this batch."""
        check_autocast(self._device)
        held = self._state
        assert held.holders is not None
        held.holders.check()
        held.modes.check(held.layers, self.training)
        held.originals.check()
        held.originals.warn_of_mode(self.training)
        held.constants.check()
        return held.programs.get(batch, kind, self.training)

    def _frozen_reads(self) -> tuple[tuple[str, str], ...]:
        held = self._state_or_none
        return () if held is None else held.bound.analysis.program.frozen.reads

    def _captured_modes(self) -> Mapping[str, bool]:
        held = self._state_or_none
        return {} if held is None else held.programs.modes

    @property
    def _planned(self) -> Mapping[str, Fingerprint]:
        """The form of the planned batch; empty before there is a plan."""
        return {} if self._state_or_none is None else self._state_or_none.programs.planned

    def _by_keyword(
        self,
        call: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Mapping[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The batch of a call, which may be one dict; options of the same names are refused."""
        found = one_dict(args, kwargs, self._planned)
        given = {name: value for name, value in options.items() if value is not None}
        check_options(call, given, self._model[0], self._planned, found is not None)
        return (args, kwargs) if found is None else ((), found)

    def step(
        self,
        *args: Any,
        batch: str | Loaded = "global",
        outputs: Callable[[Any], None] | None = None,
        weight: float = ONE,
        global_rows: int | None = None,
        skip_nonfinite: bool | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run forward and backward of every microbatch; gradients are synchronised on return.

        Inputs are the global batch, the same on every rank; with `batch="local"`, only the rows of
        `local_slice`, of a global batch as long as the planned one or of `global_rows` rows. The
        first steps compare the batch between ranks. Batches of `dataloader` bring their own mode.
        A batch planned by keyword may be one dict, which tells its keys from options.

        `outputs` is called with the outputs of each microbatch, in the model's own structure: what
        the model returns for its rows. The mean of their losses is the step's loss, so a loss over
        labels is divided by the mean count of the microbatches. (A loss that sums rows is the sum
        of theirs.)

        `weight` multiplies the gradients: 1 / n for one of n batches that share an optimizer step.

        `skip_nonfinite`: with True, a step whose loss or gradients are not finite adds no gradients
        and changes no buffers, on all ranks; with False, it does what torch does. None: it adds
        them, and an optimizer step with them raises `NonFiniteError`. (float16: `loss_scale`.)

        Returns the loss: detached, 0-d, the same on every rank, without the weight. Gradients are
        added to `.grad`. Dropout masks are new at each call, and the same for every plan.

        Raises `BatchError` if the batch does not divide or differs between ranks.
        """
        options = {
            "batch": batch, "outputs": outputs, "weight": None if weight is ONE else weight,
            "global_rows": global_rows, "skip_nonfinite": skip_nonfinite,
        }  # fmt: skip
        args, kwargs = self._by_keyword("pm.step", args, kwargs, options)
        if isinstance(kwargs.get("batch"), Loaded):
            batch = kwargs.pop("batch")
        weight = weight_of(weight, self._planned)
        mark, batch, global_rows = unwrapped(batch, global_rows)
        check_step_mode(batch)
        if not self.training:
            raise OptionError("step in evaluation mode", hint="call pm.train() first")
        given = one_form(args, kwargs)
        if self._state_or_none is None:
            if batch == "local":
                raise NotPlannedError(
                    "a local batch says nothing of the global one",
                    hint="call pm.prepare(**global_batch) first",
                )
            self._agreement.check("step", given)
            self.prepare(*args, **kwargs)
        elif batch == "global":
            self._agreement.check("step", given)
        if mark is not None:
            self._follow(mark, given)
        local, held = batch == "local", self._state
        if local and held.plan.data.accumulates:
            raise NotSupportedError(
                "a local batch of microbatches that are parts of the whole batch",
                hint="pass the global batch, or plan with microbatches=1",
            )
        whole = given
        if local:
            rows = held.local_rows
            self._agreement.check_local(given, rows.of_batch(given, global_rows))
            self._inputs(held.bound.analysis.program, given, local)  # raises if one is missing
            whole = rows.globalised(given, global_rows)
        built = self._program(whole, "step" if outputs is None else "step with outputs")
        on_outputs = None
        if outputs is not None:
            handler = outputs
            on_outputs = lambda tensors: handler(built.outputs(tensors))  # noqa: E731
        inputs = self._inputs(built.program, given, local)
        if built.program.seed is not None:
            held.seed = warn_of_seed(held.seed)
        gradients = StepGradients(held.stored.parameters, held.plan.data.accumulates)
        leaves, guard = gradients.before(), self._guard(skip_nonfinite)
        weight *= guard.before(leaves)
        loss = built.executor.step(leaves, inputs, local, on_outputs, held.stream.seed, weight)
        held.stream.n_steps += 1
        guard.after(leaves, loss)
        gradients.after()
        return loss.as_subclass(StepLoss)

    def _guard(self, skip_nonfinite: bool | None) -> Guard:
        """What is done about a step whose loss or gradients are not finite."""
        held = self._state
        if held.scaler is not None:
            return held.scaler
        if skip_nonfinite:
            return SkippedIfBad(held.finite, held.changed)
        return held.finite if skip_nonfinite is None else Unguarded()

    def forward(self, *args: Any, gather: str = "last", **kwargs: Any) -> Any:
        """The model's own output for a global batch, without gradients.

        Keys that only `loss_fn` reads are left out; its loss is that of `pm.loss(**batch)`. A loss
        that the model returns is on every rank. Other tensors are whole on the ranks of the last
        stage; `gather="all"` gives them to all ranks.
        """
        refuse_export()
        args, kwargs = self._by_keyword("pm", args, kwargs, {"gather": gather})
        if gather not in ("last", "all"):
            raise OptionError(f'gather={gather!r}: it is "last" or "all"')
        given = one_form(args, kwargs)
        if self._state_or_none is None:
            raise NotPlannedError(
                "the module is not planned yet", hint="call pm.prepare(**batch) in training mode"
            )
        if self.training:
            raise NotSupportedError(
                "calling the module in training mode",
                hint="use pm.step(**batch), pm.loss(**batch), or pm.eval()",
            )
        self._agreement.check("evaluation", given)
        if self._options.loss_fn is not None:
            given = keys_of_model(self._model[0], self._planned, given)
        built = self._program(given, "forward")
        loss, *tensors = self._run_forward(built, given, gather == "all")
        names = built.program.outputs
        return built.program.rebuild(
            [loss if n == built.program.loss else t for n, t in zip(names, tensors, strict=True)]
        )

    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a global batch, without gradients; 0-d, the same on every rank.

        It takes what `step` takes, of any number of rows, in training mode (dropout drops, norms
        over the batch take its statistics) or in evaluation mode. With `microbatches` that change
        the loss, it is the loss of the whole batch at once.

        Raises `BatchError` if the model returns no loss for this batch.
        """
        given = one_form(*self._by_keyword("pm.loss", args, kwargs, {}))
        if self._state_or_none is None:
            raise NotPlannedError("the module is not planned yet", hint="call pm.prepare(**batch)")
        self._agreement.check("loss", given)
        built = self._program(given, "loss")
        loss: Tensor | None = self._run_forward(built, given)[0]
        if loss is None:
            raise BatchError(
                f"the model returns no loss for a batch of {sorted(flatten_inputs(given))}",
                hint="pass labels, or give loss_fn=(outputs, batch) -> loss to parallelize",
            )
        return loss

    def _run_forward(self, built: Built, given: Given, everywhere: bool = False) -> tuple[Any, ...]:
        """(loss, *outputs) without gradients; the next call draws other random numbers."""
        inputs, held = self._inputs(built.program, given), self._state
        results = built.executor.forward(held.shards, inputs, False, everywhere, held.stream.seed)
        held.stream.n_steps += built.program.seed is not None
        loss, *outputs = results
        return (None if loss is None else loss.as_subclass(ForwardLoss), *outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module with parameters, buffers and random numbers of its own, and the same plan."""
        held = self._state
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__dict__.items():  # containers (hooks, ...) are own
            is_container = isinstance(value, (dict, set))
            twin.__dict__[name] = copy.copy(value) if is_container else value
        twin.__dict__["_state_or_none"] = held.copied(memo)
        twin._connect(copy.copy(self.loss_scale))
        for name, layer in held.layers.items():
            twin._state.layers[name].training = layer.training
        return twin
