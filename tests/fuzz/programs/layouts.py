"""How a program runs: one process, or thread ranks under a drawn layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Layout:
    """A mesh and the options of `parallelize`, as text; `placements` is the seed of a strategy
    of which every placement is drawn, else None."""

    mesh: tuple[int, int] = (1, 1)
    options: tuple[tuple[str, str], ...] = ()
    placements: int | None = None

    @property
    def n_ranks(self) -> int:
        return self.mesh[0] * self.mesh[1]

    @property
    def arguments(self) -> str:
        return "".join(f", {name}={value}" for name, value in self.options)

    def call(self) -> str:
        """What a user runs: the generated step beside eager torch."""
        if self.placements is not None:
            return f"# every placement drawn: {self.n_ranks} ranks, seed {self.placements}\n"
        if self.n_ranks == 1 and not self.options:
            return (
                "pm = autopar.parallelize(net, (1, 1), batch, manual=Manual())\n"
                "for _ in range(2):\n    pm.step(**batch)  # beside net(**batch) and backward\n"
            )
        return f'autopar.verify(net, {self.mesh}, batch, precision="fp64"{self.arguments}).text()\n'

    def simpler(self) -> Iterator[Layout]:
        """Layouts with less in them, the simplest first."""
        if self == ALONE:
            return
        yield ALONE
        if self.placements is not None:
            yield from (Layout((1, n), (), 0) for n in (1, 2) if n < self.n_ranks)
            return
        for k in range(len(self.options)):
            yield Layout(self.mesh, self.options[:k] + self.options[k + 1 :])
        for name, n in (("dp", 2), ("tp", 2), ("pp", 2)):
            small = Layout((1, 2), (("manual", f"Manual({name}={n})"),))
            if small != self and len(str(small)) < len(str(self)):
                yield small


ALONE = Layout()


def random_layout(rng: Random, n_ranks: int, has_blocks: bool) -> Layout:
    """A recipe, a search or drawn placements, with microbatches, recompute and ZeRO."""
    how = rng.random()
    if how < 0.35:
        return Layout((1, n_ranks), (), rng.randrange(1000))
    options: dict[str, str] = {}
    if how < 0.85:
        options["manual"] = _manual(rng, n_ranks, has_blocks)
    else:
        forbidden = rng.choice(('"data"', '"tensor"', '"pipeline"', '{"data", "pipeline"}'))
        options["forbid"] = forbidden
        if has_blocks and rng.random() < 0.3:
            options["recompute"] = rng.choice(('"full"', '"selective"', '"gathers"'))
    if rng.random() < 0.3:
        options["microbatches"] = "2"
    return Layout((1, n_ranks), tuple(options.items()))


def _manual(rng: Random, n_ranks: int, has_blocks: bool) -> str:
    sizes = {"dp": 1, "tp": 1, "pp": 1}
    left = n_ranks
    while left > 1:
        sizes[rng.choice(("dp", "dp", "tp", "tp", "pp"))] *= 2
        left //= 2
    words = [f"{name}={n}" for name, n in sizes.items() if n > 1]
    if sizes["dp"] > 1 and rng.random() < 0.6:
        words.append(f"zero={rng.randint(1, 3)}")
    if sizes["tp"] > 1 and rng.random() < 0.3:
        words.append("sp=True")
    if has_blocks and rng.random() < 0.25:
        words.append(f"recompute={rng.choice(('full', 'selective', 'gathers'))!r}")
    return f"Manual({', '.join(words)})"
