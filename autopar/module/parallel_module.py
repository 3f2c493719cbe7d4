"""The parallel module: the `nn.Module` that `autopar.parallelize` returns.

Every rank captures the graph, and rank 0 plans. The other ranks take rank 0's plan as data, check
the hash of their graph and place the plan on it. Parameters are whole tensors under the user's
names, of which the rank keeps a shard. Every other input shape, and evaluation, is a program of its
own over the same shards.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

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
    Hyperparameters,
    agreed_program,
    agreed_values,
    compare_settings,
    fingerprints,
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
from autopar.module.feeding import Feeding
from autopar.module.finite import FiniteCheck, Guard, SkippedIfBad, Unguarded
from autopar.module.habits import (
    ForwardLoss,
    PlannedModule,
    StepLoss,
    keep_from_dynamo,
    refuse_export,
    warn_of_seed,
)
from autopar.module.job import from_rank_0, join_process_group, own_rank
from autopar.module.layers import Holders, Modes, Shown
from autopar.module.optimizers import call_before_steps, warn_of_none, watch_optimizers
from autopar.module.originals import (
    ConstantBuffers,
    Originals,
    warn_of_shared,
)
from autopar.module.parameters import StepGradients, gathered_names, make_parameters
from autopar.module.programs import Built, Kind, Links, Programs, keys_of_model, warn_of_unread
from autopar.module.surface import Surface, tell_capture
from autopar.operators import Stream
from autopar.options import Options
from autopar.passes.binding import (
    check_mesh,
    example_of,
    has_nested_inputs,
)
from autopar.passes.compilation import Compilation
from autopar.passes.facts import Source, Target
from autopar.passes.pipeline import PASSES
from autopar.planning import Bound, Plan, settled_heap
from autopar.plans import PlanData
from autopar.program import Audit, Pipeline, Program, flatten_inputs
from autopar.runtime.state import (
    LossScale,
    LossScaler,
    StageState,
    all_names,
    changed_buffers,
    constant_buffers,
    everyone,
    initial_buffers,
    initial_shards,
    stage_group,
)

_NUMBERS = itertools.count()  # of the modules that this process made


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
        compare_settings(mesh, options, weights, brings, self._device)
        self._agreement = Agreement(self._device, options.check_every)
        self._plan: Plan | None = None
        self._dtensor_mesh: DeviceMesh | None = None
        self._live_buffers: frozenset[str] = frozenset()
        self._stored: dict[str, nn.Parameter] = {}
        self._held_buffers: dict[str, Tensor] = {}
        self._scaler: LossScaler | None = None
        self._not_saved: set[str] = set()
        self.training = model.training

    @property
    def code_path(self) -> Path:
        """The generated file of this rank's stage of the planned program."""
        _ = self.plan
        return self._programs.variants.first.code_path

    def captured(self) -> Audit:
        """What capture made of the model, for training: frozen, kept, replaced, refused."""
        return self._bound.analysis.program.audit

    def prepare(self, *args: Any, **kwargs: Any) -> ParallelModule:
        """Plan for a batch like this one, unless there is a plan. Returns self."""
        if self._plan is None:
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
        pipeline, program = compilation[Pipeline], compilation[Program]
        planned = compilation[Source].example_inputs
        if self._options.loss_fn is not None:
            warn_of_unread(program, self._model[0], planned)
        target = compilation[Target]
        compilation.forget(Source)
        self._links = links = Links.join(pipeline, own_rank(), self._device)
        self._place = StageState(
            pipeline, links.rank, links.device, links.groups, links.messenger, links.world
        )
        self._adopt_state(program)
        keep_from_dynamo(type(self))
        self._seed = torch.initial_seed()
        self.stream = Stream(from_rank_0(lambda: self._seed))
        self._plan = Plan(data, Bound(compilation))
        number = from_rank_0(lambda: next(_NUMBERS))
        self._programs = Programs(
            self._model[0], target, self._bound, links, self._held_buffers,
            self._live_buffers, fingerprints(planned, with_content=False), self._weights, number,
            self._originals.is_written,
        )  # fmt: skip
        self._programs.add_planned(planned, program)
        self._modes = self._programs.modes
        tell_capture(program)

    def _adopt_state(self, program: Program) -> None:
        """Set the shards, the buffers that steps change here, and the constant buffers."""
        model, place = self._model[0], self._place
        changed = changed_buffers(place, model)
        held = initial_shards(place, self._weights, model, buffers=changed)
        names = {
            name for info in program.parameters.values() for name in (info.name, *info.aliases)
        }
        gathered = gathered_names(self._options.optimizer_gather, names)
        self._stored = make_parameters(place, held, gathered)
        warn_of_none(self._stored.values(), place.stage, place.pipeline.n_stages)
        if own_rank() == 0:
            warn_of_shared(model, self)
        watch_optimizers(model)
        self._scale_losses(LossScale())
        self._watch_optimizers()
        self._live_buffers = frozenset(b.name for b in program.buffers.values())
        persistent = initial_buffers(model, torch.device("cpu"))
        constants = constant_buffers(persistent, place.changed_anywhere)
        self._held_buffers = agreed_values(constants, self._weights, self._device)
        for buffer in place.changed:
            self._held_buffers |= dict.fromkeys(all_names(buffer), changed[buffer.name])
            if not buffer.persistent:
                self._not_saved |= {*all_names(buffer)}
        self._layer_modes, self._originals = Modes(model), Originals(model)
        self._show_layers()

    def _watch_optimizers(self) -> None:
        every = self._options.check_every
        self._hyperparameters = Hyperparameters(stage_group(self._place), self._device, every)
        self._finite = FiniteCheck(everyone(self._place), self._device)
        call_before_steps(self._stored.values(), self, type(self)._prepare_optimizer)

    def _prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of these parameters steps: what all ranks must agree on before it does."""
        self._hyperparameters.check(optimizer)
        self._originals.warn_of_gradients()
        if self._scaler is not None:
            self._scaler.decide()
        else:
            self._finite.before_optimizer(self.shards)

    def _show_layers(self) -> None:
        """Show the model's layers (`layers.py`), with this rank's parameters and buffers."""
        stored = {n: self._stored[p.name] for p in self._place.parameters for n in all_names(p)}
        shown = Shown(self._model[0], stored, self._held_buffers)
        self._parameters |= shown.root_parameters
        self._buffers |= shown.root_buffers
        self._non_persistent_buffers_set |= self._not_saved & shown.root_buffers.keys()
        self._modules |= shown.children
        self._layers = {name: m for name, m in self.named_modules() if name}
        self._holders = Holders(self)
        self._constants = ConstantBuffers(self._held_buffers, self._place.changed)

    def _program(self, batch: Given, kind: Kind) -> Built:
        """The compiled program for the current mode and this batch."""
        check_autocast(self._device)
        self._holders.check()
        self._layer_modes.check(self._layers, self.training)
        self._originals.check()
        self._originals.warn_of_mode(self.training)
        self._constants.check()
        return self._programs.get(batch, kind, self.training)

    def _frozen_reads(self) -> tuple[tuple[str, str], ...]:
        return () if self._plan is None else self._bound.analysis.program.frozen.reads

    @property
    def _planned(self) -> Mapping[str, Fingerprint]:
        """The form of the planned batch; empty before there is a plan."""
        return {} if self._plan is None else self._programs.planned

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
        if self._plan is None:
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
        local = batch == "local"
        if local and self.plan.data.accumulates:
            raise NotSupportedError(
                "a local batch of microbatches that are parts of the whole batch",
                hint="pass the global batch, or plan with microbatches=1",
            )
        whole = given
        if local:
            self._agreement.check_local(given, self._local_rows.of_batch(given, global_rows))
            self._inputs(self._bound.analysis.program, given, local)  # raises if one is missing
            whole = self._local_rows.globalised(given, global_rows)
        built = self._program(whole, "step" if outputs is None else "step with outputs")
        on_outputs = None
        if outputs is not None:
            handler = outputs
            on_outputs = lambda tensors: handler(built.outputs(tensors))  # noqa: E731
        inputs = self._inputs(built.program, given, local)
        if built.program.seed is not None:
            self._seed = warn_of_seed(self._seed)
        gradients = StepGradients(self._stored, self.plan.data.accumulates)
        seed = self.stream.seed
        leaves, guard = gradients.before(), self._guard(skip_nonfinite)
        weight *= guard.before(leaves)
        loss = built.executor.step(leaves, inputs, local, on_outputs, seed, weight)
        self.stream.n_steps += 1
        guard.after(leaves, loss)
        gradients.after()
        return loss.as_subclass(StepLoss)

    def _guard(self, skip_nonfinite: bool | None) -> Guard:
        """What is done about a step whose loss or gradients are not finite."""
        if self._scaler is not None:
            return self._scaler
        if skip_nonfinite:
            changed = {b.name: self._held_buffers[b.name] for b in self._place.changed}
            return SkippedIfBad(self._finite, changed)
        return self._finite if skip_nonfinite is None else Unguarded()

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
        if self._plan is None:
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
            given = keys_of_model(self._model[0], self._programs.planned, given)
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
        if self._plan is None:
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
        inputs, seed = self._inputs(built.program, given), self.stream.seed
        results = built.executor.forward(self.shards, inputs, False, everywhere, seed)
        self.stream.n_steps += built.program.seed is not None
        loss, *outputs = results
        return (None if loss is None else loss.as_subclass(ForwardLoss), *outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module with parameters, buffers and random numbers of its own, and the same plan."""
        _ = self.plan
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        own = {"_stored", "_held_buffers", "_programs", "stream"}
        for name, value in self.__dict__.items():
            if name not in own:  # containers (hooks, ...) are own, what they hold is shared
                is_container = isinstance(value, (dict, set))
                twin.__dict__[name] = copy.copy(value) if is_container else value
        for name in ("_stored", "_held_buffers", "stream"):
            twin.__dict__[name] = copy.deepcopy(self.__dict__[name], memo)
        twin._scale_losses(copy.copy(self.loss_scale))
        twin._watch_optimizers()
        twin.__dict__["_programs"] = self._programs.for_buffers(twin._held_buffers)
        twin._show_layers()
        for name, layer in self._layers.items():
            twin._layers[name].training = layer.training
        return twin
