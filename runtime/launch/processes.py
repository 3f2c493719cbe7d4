"""Local worker processes with a process group ready: what torchrun does, from Python.

`WorkerPool` spawns n processes and sets torchrun's variables in each. They find each other
through a store that the caller hosts, so no port is guessed. A worker serves one request after
another: it receives a pickled (fn, args), and sends a pickled result or a traceback (`travel.py`).

torch's `elastic_launch` (2.13) is not used: it starts interpreters for each call, takes no function
of a notebook, knows nothing of what ranks did last, and leaves running what a worker started.

The caller waits for answers and deaths together. A killed worker makes its peers raise, too. So
after the first error the caller listens for `_GRACE_S` more, and reports a death in preference to
errors. Then it kills every worker and all that the worker started: each worker leads a session of
its own. A worker whose caller dies ends itself.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import LaunchError, MeshError, StepTimeoutError
from autopar.runtime.flight import FOLDER, LAUNCHED, diagnosis, longest_step_s, read_notes
from autopar.runtime.launch.fresh_store import is_kept_store, store_of_torchrun
from autopar.runtime.launch.travel import answer_of, dumps, importable_main, request_of

_GRACE_S = 0.5
_POLL_S = 0.25
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 10.0
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SIGNALS = {int(s): s.name for s in signal.Signals}


def init_from_environment() -> torch.device:
    """Initialise `torch.distributed` as torchrun asks, unless it is; returns this rank's device.

    NCCL on GPU `LOCAL_RANK`; gloo on the CPU if there is no GPU.

    Raises `MeshError` when torchrun's variables are absent, or name a GPU that does not exist.
    """
    if dist.is_initialized():
        return _own_device() if "nccl" in str(dist.get_backend()) else torch.device("cpu")
    absent = [name for name in _VARIABLES if name not in os.environ]
    if absent:
        raise MeshError(
            "torch.distributed is not initialised, and torchrun's variables are not set: "
            + ", ".join(absent),
            hint="start the script with torchrun --nproc-per-node N, or use "
            "autopar.launch(fn, N) on one machine",
        )
    device = _own_device() if torch.cuda.is_available() else torch.device("cpu")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if is_kept_store():
        rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = store_of_torchrun()
        dist.init_process_group(backend, store=store, rank=rank, world_size=n_ranks)
    else:
        dist.init_process_group(backend)
    return device


def _own_device() -> torch.device:
    """GPU `LOCAL_RANK`, or else the current GPU; made the current one."""
    local_rank = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    n_gpus = torch.cuda.device_count()
    if local_rank >= n_gpus:
        raise MeshError(
            f"LOCAL_RANK is {local_rank}, but this machine has {n_gpus} GPU(s)",
            hint='start fewer processes, or set CUDA_VISIBLE_DEVICES="" to use the CPU',
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def launch(
    fn: Callable[..., Any], n_ranks: int, *args: Any, timeout_s: float | None = None
) -> list[Any]:
    """Run `fn(*args)` in `n_ranks` local processes with a process group ready.

    Returns the results by rank; tensors come back as plain CPU tensors. `fn` may be any function,
    of a module or of a notebook. What workers cannot import (functions of a notebook, lambdas,
    closures) travels by value, with the globals it uses. A script must call `launch` under
    `if __name__ == "__main__":`, as for any spawned process.

    `timeout_s` bounds how long a rank stays in one action or call of a step (None: no bound).

    Raises `LaunchError` with the rank and traceback of the first worker that fails, or the
    signal that ended it, and with what every rank did last; `StepTimeoutError` after `timeout_s`.
    No process is left behind.
    """
    with WorkerPool(n_ranks, step_timeout_s=timeout_s) as pool:
        return pool.run(fn, *args)


class WorkerPool:
    """`n_ranks` workers that are started once and run one function after another.

    `run` starts the workers if none are alive: at first, and after a failure, which ends them
    all. `timeout_s` bounds each run, `step_timeout_s` each action and call of a step (None: no
    bound).
    """

    def __init__(
        self, n_ranks: int, timeout_s: float | None = None, step_timeout_s: float | None = None
    ) -> None:
        if n_ranks < 1:
            raise MeshError(f"cannot launch {n_ranks} ranks")
        self.n_ranks = n_ranks
        self.timeout_s, self.step_timeout_s = timeout_s, step_timeout_s
        self._flights: Path | None = None  # what the ranks did last
        self._workers: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None
        # Runs at the interpreter's exit too; multiprocessing would wait for live workers there.
        self._finalizer = weakref.finalize(self, _kill, self._workers)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """`fn(*args)` on every rank; the results by rank. See `launch`."""
        request = request_of(fn, args)
        try:
            if not self._workers:
                self._start()
            for pipe in self._pipes:
                # The worker died between runs; `_answers` reports it.
                with suppress(BrokenPipeError):
                    pipe.send_bytes(request)
            return self._answers(self.timeout_s, "run")
        except LaunchError as error:
            if isinstance(error, StepTimeoutError):
                error.add_note(self._diagnosis(processes=True))
            else:
                _kill(self._workers)  # then the notes are complete
                error.add_note(self._diagnosis(processes=False))
            self._abandon()
            raise
        except BaseException:  # Ctrl-C included
            self._abandon()
            raise

    def close(self) -> None:
        """Let the workers end, and kill those that do not."""
        for pipe in self._pipes:
            pipe.close()
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        _await_ends(self._workers, deadline_s)
        self._abandon()

    def _abandon(self) -> None:
        _kill(self._workers)
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        self._store = None
        if self._flights is not None:
            shutil.rmtree(self._flights, ignore_errors=True)

    def _diagnosis(self, processes: bool) -> str:
        """What every rank did last, and what the system says of their processes."""
        if self._flights is None:
            return ""
        return diagnosis(read_notes(self._flights), self.n_ranks, time.time(), processes)

    def _check_step(self) -> None:
        """Raise `StepTimeoutError` if a rank has been in one action or call for too long."""
        if self._flights is None or self.step_timeout_s is None:
            return
        if longest_step_s(read_notes(self._flights), time.time()) > self.step_timeout_s:
            raise StepTimeoutError(
                f"an action or a call of a step took longer than {self.step_timeout_s:g} s",
                hint="a rank that is behind has died, sleeps, or makes other calls",
            )

    def _start(self) -> None:
        context = get_context("spawn")
        self._store = _own_store(self.n_ranks)
        self._flights = Path(tempfile.mkdtemp(prefix="autopar-flight-"))  # 0700
        weakref.finalize(self, shutil.rmtree, self._flights, ignore_errors=True)
        with _single_threaded_children(), importable_main():
            for rank in range(self.n_ranks):
                ours, theirs = context.Pipe()
                variables = _torchrun_variables(rank, self.n_ranks, self._store.port)
                variables |= {FOLDER: str(self._flights), LAUNCHED: "1"}
                worker = context.Process(
                    target=_work, args=(theirs, variables), name=f"autopar rank {rank}"
                )
                self._pipes.append(ours)
                worker.start()
                self._workers.append(worker)
                theirs.close()
        self._answers(_START_TIMEOUT_S, "start")

    def _answers(self, timeout_s: float | None, doing: str) -> list[Any]:
        """Every worker's answer, in rank order; raises the first failure."""
        answers: dict[int, bytes] = {}
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        failure: LaunchError | None = None
        while len(answers) < self.n_ranks:
            missing = [r for r in range(self.n_ranks) if r not in answers]
            waits = {self._pipes[r]: r for r in missing}
            left_s = float("inf") if deadline_s is None else deadline_s - time.monotonic()
            ready = connection.wait(list(waits), max(0.0, min(left_s, _POLL_S)))
            if not ready:
                # The pipe of a dead worker stays open while a process it forked holds it.
                dead = [r for r in missing if _has_ended(self._workers[r])]
                if dead:
                    raise self._death(dead[0], doing)
                if left_s <= _POLL_S:
                    break
                self._check_step()
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waits[pipe]
                try:
                    kind, answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    raise self._death(rank, doing) from None
                if kind == "error" and failure is None:
                    failure = _raised(rank, self.n_ranks, answers[rank].decode())
                    deadline_s = time.monotonic() + _GRACE_S
        if failure is not None:
            raise failure
        if len(answers) < self.n_ranks:
            raise LaunchError(
                f"ranks {missing} of {self.n_ranks} did not {doing} within {timeout_s:g} s",
                hint="a collective that not all ranks call blocks for ever",
            )
        return [pickle.loads(answers[rank]) for rank in range(self.n_ranks)]

    def _death(self, rank: int, doing: str) -> LaunchError:
        """The error for a worker whose pipe closed before it answered."""
        worker = self._workers[rank]
        _await_ends([worker], time.monotonic() + _STOP_TIMEOUT_S)
        _kill(self._workers)
        code = worker.exitcode
        where = f"rank {rank} of {self.n_ranks}"
        if code is not None and code < 0:
            return LaunchError(
                f"{where} was ended by {_SIGNALS.get(-code, f'signal {-code}')}",
                hint="SIGKILL is often the system out of memory; SIGSEGV, native code"
                if -code in (signal.SIGKILL, signal.SIGSEGV)
                else None,
            )
        hint = (
            'call autopar.launch under `if __name__ == "__main__":` in a script that can be '
            "imported; the worker's own message is on stderr"
        )
        return LaunchError(
            f"{where} exited with code {code} before its {doing} was done",
            hint=hint if doing == "start" else "the function called os._exit, or native code did",
        )


def _own_store(n_ranks: int) -> dist.TCPStore:
    """A store that only this machine can reach: by itself torch listens on all addresses."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(2 * n_ranks, 128))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1", port, n_ranks, is_master=True, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def _raised(rank: int, n_ranks: int, trace: str) -> LaunchError:
    return LaunchError(f"rank {rank} of {n_ranks} raised\n{trace.rstrip()}")


def _torchrun_variables(rank: int, n_ranks: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets; the agent store is the caller's."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(n_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # The host's name may resolve to an address that is not reachable from itself.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
    }


@contextmanager
def _single_threaded_children() -> Iterator[None]:
    """One OpenMP thread per CPU worker, because workers share the cores; the user's choice wins.

    Workers inherit the variable, because torch reads it on import, before a worker could set it.
    """
    if "OMP_NUM_THREADS" in os.environ or torch.cuda.is_available():
        yield
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


def _kill(workers: list[SpawnProcess]) -> None:
    """End the workers, dead or alive, and all they started; empties the list.

    An ended worker is collected only after its process group was killed. Until then its id
    cannot name another group.
    """
    started = [worker for worker in workers if worker.pid is not None]
    for worker in started:
        assert worker.pid is not None
        # A worker that has only just started does not lead a group yet.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.kill()
    _await_ends(started, time.monotonic() + _STOP_TIMEOUT_S)
    for worker in started:
        if worker.exitcode is None:  # reading it collects an ended worker
            worker.join(_STOP_TIMEOUT_S)
    workers.clear()


def _has_ended(worker: SpawnProcess) -> bool:
    """Whether the worker has ended, without collecting it."""
    assert worker.pid is not None
    try:
        return os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True  # multiprocessing has collected it


def _await_ends(workers: Sequence[SpawnProcess], deadline_s: float) -> None:
    """Wait until the workers have ended or the deadline has passed.

    `Process.sentinel` would not do: processes that a worker forked keep it open.
    """
    while not all(map(_has_ended, workers)) and time.monotonic() < deadline_s:
        time.sleep(0.01)


def _work(pipe: Connection, variables: dict[str, str]) -> None:
    """A worker: initialise, then serve requests until the caller closes the pipe."""
    finished = threading.Event()
    atexit.register(_skip_teardown, finished)  # registered first, so it runs last
    os.setsid()
    threading.Thread(target=_follow_parent, daemon=True).start()
    os.environ.update(variables)
    _answer(pipe, init_from_environment)
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            break
        _answer(pipe, partial(_obey, request))
    if dist.is_initialized():
        dist.destroy_process_group()
    finished.set()


def _skip_teardown(finished: threading.Event) -> None:
    """End here. Otherwise the interpreter takes modules and tensors apart for a second or two."""
    if finished.is_set():
        sys.stdout.flush()
        os._exit(0)


def _obey(request: bytes) -> Any:
    fn, args = pickle.loads(request)
    return fn(*args)


def _answer(pipe: Connection, do: Callable[[], Any]) -> None:
    """Send the result of `do()`, or its traceback."""
    try:
        message = ("ok", answer_of(do()))
    except BaseException:  # noqa: BLE001 - sys.exit too; the caller raises it again
        message = ("error", traceback.format_exc().encode())
    sys.stdout.flush()  # this worker may be killed before it exits
    with suppress(BrokenPipeError):
        pipe.send_bytes(dumps(message))


def _follow_parent() -> None:
    """End this worker and all it started when the caller dies."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
