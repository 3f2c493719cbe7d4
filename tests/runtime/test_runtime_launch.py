"""Local workers: results by rank, every way a worker can fail, and lives of a job."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar.errors import LaunchError, MeshError
from autopar.runtime.launch import WorkerPool, init_from_environment, launch
from autopar.runtime.launch.fresh_store import agreed_life
from tests.helpers.nightly import nightly
from tests.helpers.pools import Pool

ROOT = Path(__file__).parents[2]


def environment_and_sum(bonus: int) -> dict[str, object]:
    x = torch.tensor([float(os.environ["RANK"]) + bonus])
    dist.all_reduce(x)
    return {
        "rank": dist.get_rank(),
        "local_rank": os.environ["LOCAL_RANK"],
        "world": os.environ["WORLD_SIZE"],
        "omp": os.environ["OMP_NUM_THREADS"],
        "device": str(init_from_environment()),
        "sum": x,
        "pid": os.getpid(),
    }


def tensors() -> tuple[torch.Tensor, ...]:
    big = torch.arange(1_000_000, dtype=torch.float64)
    weight = torch.nn.Parameter(torch.ones(3))
    return big[10:12], weight, weight * 2, torch.ones(1).expand(4), torch.tensor(True)


def fail_on(rank: int) -> int:
    """One rank raises while the other waits for it in a collective."""
    if dist.get_rank() == rank:
        raise ZeroDivisionError("planted")
    dist.all_reduce(torch.ones(1))
    return os.getpid()


def die_on(rank: int, pid_dir: str) -> None:
    """One rank is killed; each has a child process that must not outlive it."""
    Path(pid_dir, str(os.getpid())).touch()
    # Forked like a data loader's workers, so it holds the worker's pipes open.
    child = os.fork()
    if child == 0:
        time.sleep(600)
    Path(pid_dir, str(child)).touch()
    dist.barrier()
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def write_at_exit(path: str) -> None:
    atexit.register(Path(path).write_text, "written")


def is_running(pid: int) -> bool:
    """Whether `pid` runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def gone(pids: list[int]) -> bool:
    for _ in range(600):
        if not any(is_running(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def test_results_come_by_rank(workers: Pool) -> None:
    pool = workers(2)
    results = pool.run(environment_and_sum, 10)
    assert [r["rank"] for r in results] == [0, 1]
    assert [r["local_rank"] for r in results] == ["0", "1"]
    assert {r["world"] for r in results} == {"2"}
    assert {r["omp"] for r in results} == {os.environ.get("OMP_NUM_THREADS", "1")}
    assert {r["device"] for r in results} == {"cpu"}
    assert all(r["sum"].tolist() == [21.0] for r in results)
    again = pool.run(environment_and_sum, 0)
    assert [r["pid"] for r in again] == [r["pid"] for r in results]
    narrow, weight, product, expanded, flag = pool.run(tensors)[1]
    assert narrow.untyped_storage().nbytes() == 16
    assert narrow.tolist() == [10.0, 11.0]
    assert type(weight) is torch.Tensor
    assert not weight.requires_grad
    assert product.tolist() == [2.0] * 3
    assert not product.requires_grad
    assert expanded.tolist() == [1.0] * 4
    assert flag.item() is True


def test_a_rank_that_raises_ends_all() -> None:
    with WorkerPool(2) as pool:
        first = pool.run(os.getpid)
        with pytest.raises(LaunchError, match=r"rank 1 of 2 raised[\s\S]*fail_on[\s\S]*planted"):
            pool.run(fail_on, 1)
        assert gone(first)


@nightly
def test_a_pool_starts_new_workers_after_a_death(tmp_path: Path) -> None:
    with WorkerPool(2) as pool:
        with pytest.raises(LaunchError, match="rank 1 of 2 was ended by SIGKILL"):
            pool.run(die_on, 1, str(tmp_path))
        first = [int(path.name) for path in tmp_path.iterdir()]
        assert len(first) == 4
        assert gone(first)
        assert not {*pool.run(os.getpid)} & {*first}


@nightly
def test_other_ends_of_a_worker(tmp_path: Path) -> None:
    with WorkerPool(1) as pool:
        with pytest.raises(LaunchError, match="rank 0 of 1 exited with code 7"):
            pool.run(os._exit, 7)
        with pytest.raises(LaunchError, match=r"rank 0 of 1 raised[\s\S]*pickle"):
            pool.run(threading.Lock)
        # For this job only: others may need seconds, since a new worker first imports this module.
        pool.timeout_s = 1.0
        with pytest.raises(LaunchError, match=r"ranks \[0\] of 1 did not run within 1 s"):
            pool.run(time.sleep, 600)
        pool.timeout_s = None
        # A worker ends with its pool, and then runs what its jobs registered with `atexit`.
        pool.run(write_at_exit, str(tmp_path / "note"))
        pool.close()
        assert (tmp_path / "note").read_text() == "written"


def test_what_cannot_be_sent_is_refused_before_any_process_starts() -> None:
    lock = threading.Lock()
    with pytest.raises(LaunchError, match=r"cannot send .*lambda[\s\S]*make that in the function"):
        launch(lambda: lock, 2)
    with pytest.raises(LaunchError, match=r"cannot send the arguments of environment_and_sum"):
        launch(environment_and_sum, 2, lock)
    with pytest.raises(MeshError, match="0 ranks"):
        launch(environment_and_sum, 0)


# What a notebook does: nothing of it can be imported.
NOTEBOOK = """
import torch, autopar
import torch.distributed as dist
BONUS = 3
class Result:
    def __init__(self, value):
        self.value = value
def helper(x):
    dist.all_reduce(x)
    return x + BONUS
def job(n):
    return Result(helper(torch.tensor([float(n)])).item())
results = autopar.launch(job, 2, 2)
assert all(isinstance(r, Result) and r.value == 7.0 for r in results), results
assert autopar.launch(lambda: BONUS, 1) == [3]
"""


@nightly
@pytest.mark.parametrize("how", ["-c", "stdin"])
def test_functions_that_no_worker_can_import_travel_by_value(how: str) -> None:
    code, text = (["-c", NOTEBOOK], "") if how == "-c" else (["-"], NOTEBOOK)
    ran = subprocess.run(
        [sys.executable, *code], input=text, cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_init_without_torchrun_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MeshError, match=r"RANK, WORLD_SIZE[\s\S]*torchrun[\s\S]*autopar\.launch"):
        init_from_environment()


CALLER = """
import os, signal, sys, time
from pathlib import Path
from autopar.runtime.launch import launch

def wait(pid_dir):
    Path(pid_dir, str(os.getpid())).touch()
    time.sleep(600)

if __name__ == "__main__":
    # Where a script's shell runs the tests in the background, they inherit that it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    launch(wait, 1, sys.argv[1])
"""


@nightly
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_workers_end_with_their_caller(tmp_path: Path, end: signal.Signals) -> None:
    script, pid_dir = tmp_path / "caller.py", tmp_path / "pids"
    script.write_text(CALLER)
    pid_dir.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script), str(pid_dir)], env=environment, stderr=subprocess.PIPE
    ) as caller:
        try:
            for _ in range(1200):
                if list(pid_dir.iterdir()) or caller.poll() is not None:
                    break
                time.sleep(0.1)
            pids = [int(path.name) for path in pid_dir.iterdir()]
            assert len(pids) == 1
            caller.send_signal(end)
            _, stderr = caller.communicate(timeout=120)
        finally:
            caller.kill()
    assert caller.returncode == -end
    if end == signal.SIGINT:
        assert b"KeyboardInterrupt" in stderr
    assert gone(pids)


N_RANKS = 3


def life(store: dist.Store, ranks: list[int], n_ranks: int = N_RANKS) -> set[str]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return set(threads.map(lambda rank: agreed_life(store, rank, n_ranks, 20.0), ranks))


def test_each_life_has_a_word_of_its_own() -> None:
    store = dist.HashStore()
    words = [life(store, order) for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2])]
    assert all(len(found) == 1 for found in words)
    assert len(set.union(*words)) == 3
    assert len(life(store, [1, 0], n_ranks=2) | life(store, [0, 1, 2, 3], n_ranks=4)) == 2


def test_what_a_rank_that_died_early_left_is_not_taken_for_a_new_one() -> None:
    store = dist.HashStore()
    life(store, [0, 1, 2])
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(agreed_life, store, 1, N_RANKS, 20.0)
        with pytest.raises(MeshError, match=r"rank 2 did not join the job within 0\.5 s"):
            agreed_life(store, 0, N_RANKS, 0.5)
    (word,) = life(store, [0, 1, 2])
    assert word != early.result()


def test_a_rank_that_waits_for_the_first_names_it() -> None:
    with pytest.raises(MeshError, match=r"rank 0 did not join the job within 0\.1 s"):
        agreed_life(dist.HashStore(), 1, 2, 0.1)
