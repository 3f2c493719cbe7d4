"""`autopar.resilient`: a run that was ended, damaged or moved to other ranks goes on as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import Manual, OptionError, PlanError, StateError
from autopar.elastic import ResilientRun
from examples import train_resilient
from tests.helpers.jobs import advance, machine
from tests.helpers.loading import Rows, make, optimizer_of
from tests.helpers.nightly import nightly
from tests.helpers.pools import Pool

ROOT = Path(__file__).parents[2]
SIZE, N_STEPS, N_BEFORE, SAVE_EVERY = 8, 8, 5, 2


def resilient(folder: str | Path, **how: Any) -> ResilientRun:
    batch = torch.utils.data.default_collate([Rows()[i] for i in range(SIZE)])
    asked: dict[str, Any] = {"save_every": SAVE_EVERY, "mesh": lambda n: machine((1, n))}
    return autopar.resilient(folder, make(drop=0.2), batch, **(asked | how))


def losses_of(
    folder: str | Path, n_steps: int | None = N_STEPS, stop_at: int | None = None, **how: Any
) -> tuple[ResilientRun, dict[int, float]]:
    """The run, and the losses of what it trained; it is left after `stop_at` batches."""
    torch.manual_seed(0)
    epochs = how.pop("epochs", None)
    run = resilient(folder, **how)
    optimizer = optimizer_of(run.pm)
    loader = run.pm.dataloader(Rows(), SIZE, shuffle=True, seed=3)
    losses: dict[int, float] = {}
    for batch in run.batches(loader, optimizer, n_steps=n_steps, epochs=epochs):
        losses[run.n_steps] = run.pm.step(**batch).item()
        advance(optimizer)
        if stop_at == len(losses):
            break
    run._saver.wait()
    return run, losses


def job(folder: str, n_steps: int) -> dict[int, float]:
    return losses_of(folder, n_steps)[1]


def train(folder: str, n_steps: int, save_every: int) -> str:
    return train_resilient.train(Path(folder), n_steps, save_every, None)


@nightly
def test_a_killed_rank_leads_to_the_same_bits(workers: Pool, tmp_path: Path) -> None:
    # The save of batch 6 waits for that of batch 3; nothing waits for it before the kill.
    (wanted, _) = workers(2).run(train, str(tmp_path / "straight"), 8, 3)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--max-restarts=1"),
        *("--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"),
        *("examples/train_resilient.py", "--folder", str(tmp_path / "killed")),
        *("--steps", "8", "--save-every", "3", "--kill", "1:7"),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(
        command, cwd=ROOT, env=env, timeout=240, text=True, capture_output=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    said = ended.stdout.splitlines()
    begun, again = (line for line in said if line.endswith("are trained"))
    assert begun == "0 of 8 batches are trained"
    assert again in ("3 of 8 batches are trained", "6 of 8 batches are trained")
    assert said[-1] == f"weights {wanted} after 128 samples"


@pytest.mark.parametrize("ranks", [(2, 1), pytest.param((2, 4, 1), marks=nightly)])
def test_other_numbers_of_ranks_train_the_same_batches(
    ranks: tuple[int, ...], workers: Pool, tmp_path: Path
) -> None:
    straight, trained = losses_of(tmp_path / "straight")[1], dict[int, float]()
    for n_ranks in ranks:
        given = str(tmp_path / "moved"), {2: 3, 4: 6, 1: N_STEPS}[n_ranks]
        more = workers(n_ranks).run(job, *given)[0] if n_ranks > 1 else job(*given)
        assert not {*more} & {*trained}
        trained |= more
    assert list(trained) == list(straight) == list(range(N_STEPS))
    for step, loss in trained.items():
        assert loss == pytest.approx(straight[step], rel=0, abs=1e-10)


def test_a_run_that_was_left_does_again_what_was_not_saved(tmp_path: Path) -> None:
    _, straight = losses_of(tmp_path / "straight")
    _, first = losses_of(tmp_path / "left", stop_at=N_BEFORE)
    run, second = losses_of(tmp_path / "left")
    assert (run.resumed, list(second)) == (4, [4, 5, 6, 7])
    assert first | second == straight and second[4] == first[4]
    again, nothing = losses_of(tmp_path / "left")
    assert (again.n_steps, again.resumed, nothing) == (N_STEPS, N_STEPS, {})


def test_the_record_says_how_far_and_on_which_ranks(tmp_path: Path) -> None:
    run, _ = losses_of(tmp_path, n_steps=None, epochs=2)
    assert (run.n_steps, run.n_samples, run.epoch) == (10, 80, 2)
    record = json.loads((tmp_path / "step-00000010" / "autopar.json").read_text())
    (plan,) = (tmp_path / "plans").iterdir()
    own = record["extra"]["resilient"]
    assert (own["n_samples"], own["n_ranks"], own["mesh"]) == (80, 1, [1, 1])
    assert own["plan"] == sha256(plan.read_bytes()).hexdigest()
    more, trained = losses_of(tmp_path, n_steps=None, epochs=3)
    assert (more.n_samples, more.epoch, list(trained)) == (120, 3, [10, 11, 12, 13, 14])


class Drawn:
    """A loader of a user's own: it draws rows without end, and its state is its generator's."""

    def __init__(self) -> None:
        self.rows, self.generator = Rows(), torch.Generator().manual_seed(11)

    def __iter__(self) -> Iterator[Any]:
        while True:
            drawn = torch.randint(len(self.rows), (SIZE,), generator=self.generator)
            yield torch.utils.data.default_collate([self.rows[i] for i in drawn.tolist()])

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def test_a_loader_of_a_users_own_goes_on(tmp_path: Path) -> None:
    losses = []
    for n_steps in (5, 9):
        run = resilient(tmp_path)
        for batch in run.batches(Drawn(), n_steps=n_steps):
            losses.append(run.pm.loss(**batch).item())
    run = resilient(tmp_path / "straight")
    assert losses == [run.pm.loss(**batch).item() for batch in run.batches(Drawn(), n_steps=9)]
    assert run.n_samples == 9 * SIZE


def test_a_checkpoint_of_another_loop_is_refused(tmp_path: Path) -> None:
    run = resilient(tmp_path)
    autopar.save(run.pm, None, tmp_path / "step-00000003", states={"loader": NoBatches()})
    with pytest.raises(StateError, match=r"was not saved by autopar\.resilient"):
        run.batches(NoBatches(), n_steps=4)


class NoBatches:
    """A loader of a user's own: no batches."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    run = resilient(tmp_path)
    with pytest.raises(OptionError, match="a loader of list has no state_dict"):
        run.batches([{"x": torch.zeros(1)}], n_steps=1)
    with pytest.raises(OptionError, match="how long the run is"):
        run.batches(NoBatches())
    with pytest.raises(OptionError, match="saved by this name"):
        run.batches(NoBatches(), n_steps=1, states={"loader": NoBatches()})
    with pytest.raises(OptionError, match="the loader has no batches"):
        list(run.batches(NoBatches(), n_steps=1))
    with pytest.raises(OptionError, match="save_every is a count"):
        resilient(tmp_path, save_every=0)


def plan_of(mesh: tuple[int, int], **options: Any) -> autopar.Plan:
    batch = torch.utils.data.default_collate([Rows()[i] for i in range(SIZE)])
    return autopar.plan(make(drop=0.2), machine(mesh), batch, **options)


def test_a_plan_made_ahead_is_used_for_its_mesh(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plans = tmp_path / "plans"
    plans.mkdir()
    plan_of((1, 2), manual=Manual(tp=2)).save(plans / "two.json")
    ahead = plan_of((1, 1))
    ahead.save(plans / "one.json")
    run = resilient(tmp_path / "run", plans=plans)
    assert run.pm.plan.stats is None and run.pm.plan.data == ahead.data
    assert not (tmp_path / "run").exists()
    ahead.save(plans / "again.json")
    with pytest.raises(OptionError, match=r"again\.json and .*one\.json are both for a mesh"):
        resilient(tmp_path / "run", plans=plans)
    flat: dict[str, Any] = {"mesh": lambda n: machine((1,))}
    with pytest.warns(UserWarning, match=r"has no plan for a mesh \(1,\): the run plans itself"):
        assert resilient(tmp_path / "run", plans=plans, **flat).pm.plan.stats is not None
    with pytest.raises(OptionError, match="is no folder"):
        resilient(tmp_path / "run", plans=tmp_path / "none")


def test_a_run_keeps_its_plan_until_something_else_is_asked_for(tmp_path: Path) -> None:
    first = resilient(tmp_path).pm.plan
    again = resilient(tmp_path).pm.plan
    assert first.stats is not None and again.stats is None and first.data == again.data
    other = resilient(tmp_path, optimizer="sgd").pm.plan
    assert other.stats is not None and len([*(tmp_path / "plans").iterdir()]) == 2


def test_a_plan_of_another_model_is_named(tmp_path: Path) -> None:
    batch = torch.utils.data.default_collate([Rows()[i] for i in range(SIZE)])
    autopar.plan(make(norm=True), machine((1, 1)), batch).save(tmp_path / "one.json")
    with pytest.raises(PlanError, match=r"one\.json does not fit this model"):
        resilient(tmp_path / "run", plans=tmp_path)
