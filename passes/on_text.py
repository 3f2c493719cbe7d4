"""Some passes, run on programs that are given as text (`program/lines/text.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import AutoparError, OptionError
from autopar.mesh import LogicalMesh, Mesh
from autopar.options import Options
from autopar.passes.compilation import Compilation
from autopar.passes.facts import Differentiated, Target, Unverified
from autopar.passes.pipeline import PASSES
from autopar.program.lines import JointProgram, Pipeline, StageProgram, parse_programs
from autopar.schedule import forward_only, one_f_one_b


def run_passes(text: str, names: Sequence[str], device: str = "cpu") -> Compilation:
    """Run the passes `names` on stages, as `lower` or `differentiate` prints them.

    Raises `OptionError` if the text is no program, or if a pass needs what neither the text nor a
    pass before it has; and whatever the passes raise.
    """
    programs = parse_programs(text, StageProgram, JointProgram)
    stages = [p.stage if isinstance(p, JointProgram) else p for p in programs]
    if not stages:
        raise OptionError("the text has no program")
    pipeline = _pipeline_of(stages)
    target = Target(Mesh((pipeline.n_ranks,)), Options(), device)
    facts: list[object] = [target, pipeline]
    if any(isinstance(p, JointProgram) for p in programs):
        facts.append(Differentiated(tuple(p for p in programs if isinstance(p, JointProgram))))
    elif "verify" in names:
        facts[-1] = Unverified(pipeline)
    chosen = [one for one in PASSES if one.name() in names]
    unknown = {*names} - {one.name() for one in chosen}
    if unknown:
        raise OptionError(f"no pass is called {', '.join(sorted(unknown))}", hint="autopar passes")
    known = {type(fact) for fact in facts}
    for one in chosen:
        missing = [kind.__name__ for kind in one.requires if kind not in known]
        if missing:
            raise OptionError(
                f"{one.name()} reads {', '.join(missing)}, which the text does not have",
                hint="a program's text can be verified, differentiated and emitted, in this order",
            )
        known |= {*one.provides}
    compilation = Compilation(chosen, *facts)
    for one in chosen:
        try:
            for kind in one.provides:
                _ = compilation[kind]
        except AutoparError:
            raise
        except Exception as error:  # `verify` does not prove that operators take their arguments
            raise OptionError(
                f"{one.name()} fails on this program: {type(error).__name__}: {error}",
                hint="autopar never writes such a program: undo what was edited",
            ) from error
    return compilation


def _pipeline_of(stages: Sequence[StageProgram]) -> Pipeline:
    """The stages joined, on consecutive ranks."""
    meshes, n_ranks = list[LogicalMesh](), 0
    for stage in stages:
        if len(stage.axis_sizes) != len(stage.axis_names):
            raise OptionError(f"axes {stage.axis_names} have sizes {stage.axis_sizes}")
        meshes.append(LogicalMesh.unpriced(stage.axis_sizes, stage.axis_names, n_ranks))
        n_ranks += meshes[-1].n_ranks
    trains = all(stage.trains for stage in stages)
    return Pipeline.of(stages, meshes, one_f_one_b if trains else forward_only)
