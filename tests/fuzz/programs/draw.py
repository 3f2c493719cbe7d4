"""Draws programs from the tables: fills a template's holes, runs it, keeps what runs.

Every statement runs as soon as it is drawn, so shapes are known and what torch refuses is drawn
again. A whole program is kept if it runs eagerly both ways and its values are neither huge nor NaN.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.programs.grammar import (
    BLOCK_LINES,
    FAMILIES,
    FIRST,
    LOOPS,
    LOSSES,
    RETURNS,
)
from tests.fuzz.programs.holes import (
    HOLE,
    MOST_ELEMENTS,
    REFUSED,
    Holes,
    NoDrawError,
    is_real,
    is_tensor,
)
from tests.fuzz.programs.program import (
    BATCH,
    INPUTS,
    NAMES,
    Line,
    Program,
    Scope,
    run_text,
)

MOST_DIMS, LARGEST = 5, 1e3
N_LINES = (2, 6)
_PART = re.compile(r"\{((?:[^{}])*)\}")


def random_program(base: int, number: int) -> Program:
    """Program `number` of a base seed, always the same."""
    rng = Random(f"program {base} {number}")
    while True:
        program = _drawn(rng)
        if program is not None and runs(program):
            return program


def runs(program: Program) -> bool:
    """Whether eager torch can train it; without checkpoints too, because they hide writes to what
    backward needs, and torch then computes something else."""
    if "= checkpoint(" in program.text() and not _trains(program, keeps_checkpoints=False):
        return False
    return _trains(program)


def _trains(program: Program, keeps_checkpoints: bool = True) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net, batch = program.build(keeps_checkpoints)
            with torch.random.fork_rng(devices=()):
                loss = loss_of(net(**batch))
                loss.backward()
    except REFUSED:
        return False
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    values = [loss, *grads, *net.buffers()]
    return bool(grads) and all(_is_sane(v.detach(), 1e5) for v in values)


def loss_of(out: Any) -> Tensor:
    if isinstance(out, dict):
        return out["loss"]
    return out[0] if isinstance(out, tuple) else out


def _drawn(rng: Random) -> Program | None:
    draw = Draw.begin(rng)
    n_loops, n_lines = rng.choice((0, 0, 1)), rng.randint(*N_LINES)
    loops_at = {rng.randrange(n_lines) for _ in range(n_loops)}
    for _ in range(rng.choice((1, 1, 2))):
        draw.line(FIRST)
    for k in range(n_lines):
        if k in loops_at:
            draw.loop()
        draw.line()
    return draw.program() if draw.losses() else None


def _is_sane(value: Tensor, largest: float = LARGEST) -> bool:
    if not (value.is_floating_point() or value.is_complex()):
        return True
    return value.numel() == 0 or bool(value.abs().max() < largest)


@dataclass
class Draw(Holes):
    """A scope so far: its values on one batch, and what is drawn from."""

    init: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    blocks: list[Scope] = field(default_factory=list)
    n_names: int = 0
    seed: int = 0
    _new_parts: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def begin(cls, rng: Random) -> Draw:
        """A model that has its inputs."""
        draw = cls(rng, seed=rng.randrange(1000))
        torch.manual_seed(draw.seed)
        for name, made in INPUTS.items():
            draw.values[name] = eval(made, draw.space)
        return draw

    def program(self) -> Program:
        net = Scope(
            "Net", tuple(INPUTS), tuple(self.init), tuple(self.lines), tuple(self.results),
            self.returned_beside_loss(),
        )  # fmt: skip
        return Program((*self.blocks, net), self.seed).pruned()

    def name(self, letter: str) -> str:
        self.n_names += 1
        return f"{letter}{self.n_names}"

    # Statements

    def line(self, families: Any = FAMILIES) -> bool:
        """Add one statement; gives up after many that do not run."""
        for _ in range(60):
            names, weights = zip(*((f, f[0]) for f in families), strict=True)
            _, table = self.rng.choices(names, weights)[0]
            if self.statement(self.rng.choice(table)):
                return True
        return False

    def statement(self, template: str) -> bool:
        """Try a template; False if it does not fit here."""
        try:
            filled = self.filled(template)
        except NoDrawError:
            return False
        text = self._with_parts(filled)
        before = len(self.init)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for name, made in self._new_parts:
                    exec(f"self.{name} = {made}", self.space, {"self": self.holder})
                    self._add_init(name, made)
                writes = self._run(text, is_bare=template.startswith("!"))
        except REFUSED:
            writes = None
        if writes is None:
            for name, _ in self._new_parts:
                _delete(self.holder, name)
            del self.init[before:]
            return False
        return True

    def _add_init(self, name: str, made: str) -> None:
        """A part: a module, a parameter, or a buffer; some are frozen, some tied."""
        if made.startswith("torch."):
            _delete(self.holder, name)
            self.init.append(f'self.register_buffer("{name}", {made})')
            self.holder.register_buffer(name, eval(made, self.space).double())
            return
        self.init.append(f"self.{name} = {made}")
        part = getattr(self.holder, name)
        if isinstance(part, nn.Module):
            part.double()
        else:
            setattr(self.holder, name, nn.Parameter(part.detach().to(_wide(part.dtype))))
        if self.rng.random() < 0.08:
            self.init.append(f"self.{name}.requires_grad_(False)")
            getattr(self.holder, name).requires_grad_(False)

    def _with_parts(self, text: str) -> str:
        """`{nn.Linear(4, 8)}` becomes `self.m3`: new, an earlier one, or new and tied to it."""
        self._new_parts = []

        def part(match: re.Match[str]) -> str:
            made = match[1]
            alike = [
                line.split(" = ")[0].removeprefix("self.")
                for line in self.init
                if line.endswith(f" = {made}")
            ]
            if alike and self.rng.random() < 0.4:
                return f"self.{self.rng.choice(alike)}"
            name = self.name("m")
            self._new_parts.append((name, made))
            return f"self.{name}"

        return _PART.sub(part, text)

    def _run(self, text: str, is_bare: bool) -> tuple[str, ...] | None:
        """Run a statement; the names it writes, None if its value is no good."""
        local = {"self": self.holder, **self.values}
        read = [n for n in dict.fromkeys(NAMES.findall(text)) if n in self.values]
        if is_bare:
            text = text.removeprefix("!")
            names = re.findall(r"NEW_([vsl])", text)
            renames = {letter: self.name(letter) for letter in dict.fromkeys(names)}
            for letter, name in renames.items():
                text = text.replace(f"NEW_{letter}", name)
            exec(text, self.space, local)
            found = {name: local[name] for name in renames.values()}
            shape = ""
        else:
            out = eval(text, self.space, local)
            outs = list(out) if isinstance(out, tuple | list) else [out]
            if not 0 < len(outs) <= 4:
                return None
            found = {self.name("v"): value for value in outs}
            text = f"{', '.join(found)} = {text}"
            shape = _described(outs[0]) if len(outs) == 1 else ""
        if not all(_fits(value) for value in found.values()):
            return None
        if not all(_is_sane(self.values[n].detach()) for n in read if is_tensor(self.values[n])):
            return None
        self.lines.append(Line(text, tuple(found), shape))
        self.values |= found
        self.unread = [n for n in self.unread if n not in read] + list(found)
        return tuple(found)

    # Blocks in a row

    def loop(self) -> bool:
        """A new block, and a loop over copies of it whose states others may read."""
        try:
            name = self.pick(lambda v: is_real(v) and v.dim() == 3 and v.shape[0] == BATCH)
        except NoDrawError:
            return False
        block = _block(self, f"Block{len(self.blocks)}", self.values[name])
        if block is None:
            return False
        scope, extra = block
        self.space |= run_text(scope.text(), "<block>", self.space)
        n = self.rng.choice((2, 3, 4, 4, 4, 4, 5, 5, 8, 10))
        template = self.rng.choice(LOOPS)
        if "pop" in template and extra is None:
            return False
        blocks = f"{{nn.ModuleList({scope.name}() for _ in range({n}))}}"
        text = template.replace("$blocks", blocks).replace("$h", name)
        text = text.replace("$extra", f", {extra}" if extra else "").replace("$n", str(n))
        if not self.statement(f"!{text}"):
            return False
        self.blocks.append(scope)
        part = self._new_parts[0][0] if self._new_parts else None
        tied = re.findall(r"self\.(m\d+) = nn\.Linear", "\n".join(scope.init))
        if part and tied and self.rng.random() < 0.25:
            weight = f"{self.rng.choice(tied)}.weight"
            i, j = self.rng.sample(range(n), 2)
            self.init.append(f"self.{part}[{i}].{weight} = self.{part}[{j}].{weight}")
        for _ in range(self.rng.choice((0, 1, 1, 2))):  # states are read elsewhere
            states = [k for k, v in self.values.items() if isinstance(v, list) and v]
            if states:
                self.statement(self.rng.choice(BLOCK_LINES))
        return True

    # The end

    def losses(self) -> bool:
        """Terms of what nothing reads; False if there is none. What has no gradient scales one."""
        for name in list(self.unread):
            if is_tensor(v := self.values[name]) and not (v.requires_grad or v.is_complex()):
                self.statement(f"$a * {name}.double().mean()")
        ends = [
            n for n in self.unread
            if is_tensor(v := self.values[n]) and v.requires_grad and not v.is_complex()
        ]  # fmt: skip
        complex_ends = [n for n in self.unread if is_tensor(v := self.values[n]) and v.is_complex()]
        for name in complex_ends:
            if self.values[name].requires_grad and self.statement(f"{name}.abs()"):
                ends.append(self.lines[-1].writes[0])
        for name in ends:
            self._loss(name)
        return bool(self.results)

    def _loss(self, name: str) -> None:
        for _ in range(20):
            template = self.rng.choice(LOSSES)
            for hole in HOLE.findall(template):
                if hole == "v":
                    template = template.replace("$v", name)
            if "labels" in template and self.values[name].shape[:2] != (BATCH, 4):
                continue
            n_before = len(self.lines)
            if self.statement(template):
                term = self.lines[-1].writes[0]
                if self.values[term].dim() == 0:
                    scale = self.rng.choice(("", "", "0.5 * "))
                    self.results.append(f"{scale}{term}")
                    return
                del self.lines[n_before:]

    def returned_beside_loss(self) -> str:
        """What the model returns, the loss in it."""
        reals = [n for n in self.values if n.startswith("v") and is_tensor(self.values[n])]
        template = self.rng.choice(RETURNS)
        return template.replace("$v", self.rng.choice(reals)) if reals else ""


def _block(outer: Draw, name: str, h: Tensor) -> tuple[Scope, str | None] | None:
    """A class whose forward keeps the shape of `h`, and a value of `outer` that it reads too."""
    inner = Draw(outer.rng)
    inner.space = dict(outer.space)
    inner.values["h"] = h.detach().clone().requires_grad_()
    extra = None
    if outer.rng.random() < 0.35:
        try:
            extra = outer.pick(lambda v: is_real(v) and v.shape == h.shape)
        except NoDrawError:
            extra = None
    if extra is not None:
        inner.values["c"] = outer.values[extra].detach().clone()
    inner.n_names = 100
    for _ in range(outer.rng.randint(1, 4)):
        inner.line()
    fits = [
        n for n, v in inner.values.items() if n not in "hc" and is_real(v) and v.shape == h.shape
    ]
    ends = [n for n in inner.unread if n in fits] or fits
    if not ends and inner.statement(f"{{nn.Linear($H, {h.shape[-1]})}}($a)"):
        ends = [n for n in inner.lines[-1].writes if inner.values[n].shape == h.shape]
    if not ends:
        return None
    norm = f"F.layer_norm({{}} + h, ({h.shape[-1]},))"
    result = outer.rng.choice(("h + {}", "h + {}", "torch.tanh({})", norm))
    inputs = ("h", "c") if extra is not None else ("h",)
    scope = Scope(name, inputs, tuple(inner.init), tuple(inner.lines), (result.format(ends[-1]),))
    return scope, extra


def _fits(value: Any) -> bool:
    if isinstance(value, list):
        return all(_fits(v) for v in value)
    return (
        is_tensor(value)
        and 0 < value.numel() <= MOST_ELEMENTS
        and value.dim() <= MOST_DIMS
        and _is_sane(value.detach())
        and value.dtype in (torch.float64, torch.complex128, torch.int64, torch.bool)
    )


def _described(value: Tensor) -> str:
    kind = "" if value.is_floating_point() else f" {str(value.dtype).removeprefix('torch.')}"
    return "x".join(map(str, value.shape)) + kind


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _delete(holder: nn.Module, name: str) -> None:
    if hasattr(holder, name):
        delattr(holder, name)
