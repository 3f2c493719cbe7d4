"""The quantities of a profile, each with its source, from fits and from the machine.

One machine cannot show everything. The datasheet's peaks and the link between nodes come from the
shipped profile of the same GPU, if there is one, and the source says so.

If whole steps were timed, achieved numbers are those in steps: rates and bandwidth are divided by
the ratios of `fit_steps`, launch time and the constants of links are multiplied by them. Peaks are
those of operators alone.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from autopar.calibration.fit import LinkFit, MemoryFit, ProductFit, Residual, StepFit, median_error
from autopar.calibration.machine import LocalMachine
from autopar.calibration.samples import Samples
from autopar.cost.hardware import DEFAULT_PROFILE, Profile, Quantity, detect, load_profile
from autopar.errors import CalibrationError
from autopar.units import format_seconds

Quantities = dict[str, Quantity]
_ONE_MACHINE = "the nodes of a local mesh are processes of one machine: link.intra_node's"
_ONE_NODE = "not measured, as there is one node: assumed to be as inside it"
_MEMORY_BOUND = "add, mul, gelu, layer_norm and softmax, forward and backward"


@dataclass(frozen=True)
class ProfileNumbers:
    """Turns what is known about a machine into quantities by dotted key."""

    machine: LocalMachine
    samples: Samples
    memory: MemoryFit
    products: ProductFit
    link: LinkFit | None
    steps: StepFit | None = None

    def all(self) -> Quantities:
        device = self._capacity() | self._bandwidth() | self._interpreter()
        return device | self._rates() | self._attention() | self._links() | self._cores()

    @cached_property
    def _where(self) -> str:
        version, today = torch.__version__.partition("+")[0], datetime.date.today().isoformat()
        return f"{self.machine.device}, torch {version}, {today}"

    @cached_property
    def _shipped(self) -> Profile | None:
        """The shipped profile of the same GPU."""
        name = detect() if self.machine.is_cuda else DEFAULT_PROFILE
        return None if name == DEFAULT_PROFILE else load_profile(name)

    def _known(self, key: str) -> Quantity | None:
        return self._shipped.quantities.get(key) if self._shipped is not None else None

    def _larger(self, key: str, measured: Quantity) -> Quantity:
        """The number of the shipped profile, unless a larger one was measured."""
        known = self._known(key)
        return measured if known is None or known.value < measured.value else known

    def _measured(self, how: str) -> str:
        n = self.samples.n_busy
        return f"measured on {self._where}, {n} rank{'s' * (n > 1)} busy: {how}"

    def _fitted(self, what: str, residuals: Sequence[Residual]) -> str:
        return self._measured(
            f"least squares over {len(residuals)} timings of {what}, "
            f"median error {median_error(residuals):.0%}"
        )

    @property
    def _ratios(self) -> StepFit:
        """The ratios of whole steps; 1 where none were timed."""
        return self.steps or StepFit(1.0, 1.0, 1.0, ())

    def _in_steps(self, what: str, ratio: float, how: str) -> str:
        """The source of a constant that was fitted to parts of steps, and then to steps."""
        if self.steps is None:
            return how
        residuals = self.steps.residuals
        return (
            f"{how}; then {what} {ratio:.2f}, by least squares over {len(residuals)} whole steps "
            f"in float32, median error {median_error(residuals):.0%}"
        )

    def _capacity(self) -> Quantities:
        machine, samples = self.machine, self.samples
        key = "device.memory_margin_fraction"
        if machine.is_cuda:
            whole = Quantity(machine.memory_bytes, f"CUDA's total of {self._where}")
            how = self._measured("held by CUDA's context and NCCL's buffers")
            # A shipped margin also covers what an allocator loses to fragmentation.
            margin = self._larger(key, Quantity(machine.held_bytes / machine.memory_bytes, how))
            return {"device.memory_bytes": whole, key: margin}
        n_ranks = max([samples.n_busy, *(n for n, _ in samples.turns)])
        share = machine.memory_bytes / n_ranks
        of = f"memory of {self._where}, for {n_ranks} ranks; set memory_limit for others"
        how = self._measured("what a rank holds before it has a tensor")
        return {
            "device.memory_bytes": Quantity(share, of),
            key: Quantity(machine.held_bytes / share, how),
        }

    def _bandwidth(self) -> Quantities:
        memory = self.memory
        best = max(s.size_bytes / s.time_s for s in self.samples.operators if not s.dtype)
        ratios = self._ratios
        achieved = memory.bytes_per_s / ratios.work_ratio
        peak = max(best, memory.bytes_per_s, achieved)
        how = self._fitted(_MEMORY_BOUND, memory.residuals)
        fastest = self._measured("the fastest of its memory-bound operators")
        return {
            "device.peak_bytes_per_s": Quantity(peak, fastest),
            "device.achieved_bandwidth_fraction": Quantity(
                achieved / peak, self._in_steps("over", ratios.work_ratio, how)
            ),
            "device.launch_s": Quantity(
                memory.launch_s * ratios.launch_ratio,
                self._in_steps("times", ratios.launch_ratio, how),
            ),
        }

    def _interpreter(self) -> Quantities:
        """On a CPU the interpreter is the device: its time is in launch_s."""
        if not self.samples.issue:
            return {}
        times_s = [s.time_s / s.n_operators for s in self.samples.issue]
        how = self._measured("small operators issued through autograd; the median of kinds")
        return {"device.host_s": Quantity(statistics.median(times_s), how)}

    def _rates(self) -> Quantities:
        found, ratio = {}, self._ratios.work_ratio
        for dtype, alone in self.products.rates_flops_per_s.items():
            rate, peak = alone / ratio, self._peak(dtype)
            residuals = [r for r in self.products.residuals if r.name.startswith(dtype)]
            how = self._fitted(f"{dtype} linear and its backward", residuals)
            found[f"device.peak_flops_per_s.{dtype}"] = peak
            share = Quantity(rate / peak.value, self._in_steps("over", ratio, how))
            found[f"device.achieved_flops_fraction.{dtype}"] = share
        how = self._fitted("linear and its backward", self.products.residuals)
        traffic = Quantity(self.products.traffic_ratio, how)
        return found | {"device.product_traffic_ratio": traffic}

    def _peak(self, dtype: str) -> Quantity:
        """The datasheet's peak, unless this device is faster than its datasheet."""
        fit = self.products
        endless = fit.rates_flops_per_s[dtype]
        rate = max(endless, endless / self._ratios.work_ratio, fit.best_flops_per_s[dtype])
        how = self._measured("the fastest matmul, or an infinite one by the fit if that is faster")
        return self._larger(f"device.peak_flops_per_s.{dtype}", Quantity(rate, how))

    def _attention(self) -> Quantities:
        if not self.samples.attention:
            return {}
        forward, both = self.samples.attention
        backward_s = both.time_s - forward.time_s
        if backward_s <= 0:
            raise CalibrationError(
                f"attention took {format_seconds(forward.time_s)}, and no longer with its "
                f"backward: {format_seconds(both.time_s)}",
                hint="something else kept the machine busy; calibrate again when it is idle",
            )
        peak = self._peak(forward.dtype).value
        how = self._measured(f"causal attention of {forward.size}, {forward.dtype}")
        shares = {
            "forward": forward.flops / forward.time_s / peak,
            "backward": (both.flops - forward.flops) / backward_s / peak,
        }
        return {f"device.attention_fraction.{p}": Quantity(s, how) for p, s in shares.items()}

    def _links(self) -> Quantities:
        found = {}
        for name in ("latency_s", "s_per_byte"):
            inside, key = self._inside(name), f"link.inter_node.{name}"
            assumed = Quantity(inside.value, _ONE_NODE if self.machine.is_cuda else _ONE_MACHINE)
            found[f"link.intra_node.{name}"] = inside
            found[key] = self._known(key) or assumed
        for kind, ratio in self.link.link.ratios if self.link is not None else ():
            how = self._fitted(kind, [r for r in self._transfers if r.name.startswith(kind)])
            found[f"backend.{kind}_ratio"] = Quantity(ratio, how)
        return found

    @property
    def _transfers(self) -> tuple[Residual, ...]:
        return self.link.residuals if self.link is not None else ()

    def _inside(self, name: str) -> Quantity:
        if self.link is not None:
            sizes = sorted({s.n_ranks for s in self.samples.transfers})
            what = f"collectives and messages over {' and '.join(map(str, sizes))} ranks"
            how, ratio = self._fitted(what, self.link.residuals), self._ratios.transfer_ratio
            alone = getattr(self.link.link, name)
            return Quantity(alone * ratio, self._in_steps("times", ratio, how))
        known = self._known(f"link.intra_node.{name}")
        if known is None:
            raise CalibrationError(
                f"one rank has no collectives to measure, and no shipped profile of "
                f"{self.machine.device} knows its links",
                hint="calibrate on a machine with several GPUs",
            )
        return known

    def _cores(self) -> Quantities:
        if self.machine.is_cuda:
            return {}
        seen = "".join(
            f"; measured: {n} ranks took {ratio:.2f} times as long as {self.samples.n_busy}"
            for n, ratio in self.samples.turns
        )
        return {"node.cores_count": Quantity(self.machine.n_slots, f"of {self._where}{seen}")}
