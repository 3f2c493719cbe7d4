"""Local worker processes with a process group ready: what torchrun does, from Python.

`WorkerPool` spawns n processes and sets torchrun's variables in each. They find each other
through a store that the caller hosts, so no port is guessed. A worker serves one request after
another: it receives a pickled (fn, args), and sends a pickled result or a traceback. Functions and
classes that workers cannot import travel by value (cloudpickle). Tensors travel as plain copies on
the CPU, never as shared memory, so no file descriptor outlives a call.

The caller waits for answers and deaths together. A killed worker makes its peers raise, too. So
after the first error the caller listens for `_GRACE_S` more, and reports a death in preference to
errors. Then it kills every worker and all that the worker started: each worker leads a session of
its own. A worker whose caller dies ends itself.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from io import BytesIO
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import LaunchError, MeshError

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
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = _own_device()
    dist.init_process_group("nccl")
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


def launch(fn: Callable[..., Any], n_ranks: int, *args: Any) -> list[Any]:
    """Run `fn(*args)` in `n_ranks` local processes with a process group ready.

    Returns the results by rank; tensors come back as plain CPU tensors. `fn` may be any function,
    of a module or of a notebook. What workers cannot import (functions of a notebook, lambdas,
    closures) travels by value, with the globals it uses. A script must call `launch` under
    `if __name__ == "__main__":`, as for any spawned process.

    Raises `LaunchError` with the rank and traceback of the first worker that fails, or the
    signal that ended it. No process is left behind.
    """
    with WorkerPool(n_ranks) as pool:
        return pool.run(fn, *args)


class WorkerPool:
    """`n_ranks` workers that are started once and run one function after another.

    `run` starts the workers if none are alive: at first, and after a failure, which ends them
    all. `timeout_s` bounds each run (None: no bound).
    """

    def __init__(self, n_ranks: int, timeout_s: float | None = None) -> None:
        if n_ranks < 1:
            raise MeshError(f"cannot launch {n_ranks} ranks")
        self.n_ranks = n_ranks
        self.timeout_s = timeout_s
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
        request = _request(fn, args)
        try:
            if not self._workers:
                self._start()
            for pipe in self._pipes:
                # The worker died between runs; `_answers` reports it.
                with suppress(BrokenPipeError):
                    pipe.send_bytes(request)
            return self._answers(self.timeout_s, "run")
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

    def _start(self) -> None:
        context = get_context("spawn")
        self._store = dist.TCPStore(
            "127.0.0.1", 0, self.n_ranks, is_master=True, wait_for_workers=False
        )
        with _single_threaded_children(), _importable_main():
            for rank in range(self.n_ranks):
                ours, theirs = context.Pipe()
                variables = _torchrun_variables(rank, self.n_ranks, self._store.port)
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


def _raised(rank: int, n_ranks: int, trace: str) -> LaunchError:
    return LaunchError(f"rank {rank} of {n_ranks} raised\n{trace.rstrip()}")


def _request(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """(fn, args) pickled; the function is pickled alone first, for a clear message."""
    name = getattr(fn, "__qualname__", repr(fn))
    try:
        _sent(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"cannot send {name} to worker processes: {error}",
            hint="it uses something that cannot be pickled; make that in the function",
        ) from error
    try:
        return _sent((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"cannot send the arguments of {name} to worker processes: {error}",
            hint="pass plain data and tensors; build models and loaders in the function",
        ) from error


def _sent(value: Any) -> bytes:
    """Pickled by reference to what workers can import; else functions and classes by value."""
    if _main_file() is not None or "__main__" not in sys.modules:
        with suppress(pickle.PicklingError, AttributeError, TypeError):
            return _dumps(value)
    return _dumps(value, _by_value())


def _main_file() -> str | None:
    """What workers import as `__main__`; None in notebooks, `python -c` and scripts from stdin."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None:
        return path  # python -m
    return path if path is not None and os.path.exists(path) else None


@contextmanager
def _importable_main() -> Iterator[None]:
    """Multiprocessing would import a `__file__` that is only a name, such as `<stdin>`."""
    main = sys.modules["__main__"]
    if _main_file() is not None or not hasattr(main, "__file__"):
        yield
        return
    name = main.__file__
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = name


class _Pickler(pickle.Pickler):
    """Pickles tensors as detached CPU copies of only their elements."""

    def reducer_override(self, obj: Any) -> Any:
        return _plain_tensor(obj)


@cache
def _by_value() -> type[pickle.Pickler]:
    """The same, and functions and classes that cannot be imported by value."""
    try:
        from cloudpickle import Pickler
    except ImportError as error:
        raise LaunchError(
            "what a notebook or a closure defines travels to workers by cloudpickle, which is "
            "not installed",
            hint="pip install cloudpickle, or define the function at the top level of a module",
        ) from error

    class ByValue(Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            reduced = _plain_tensor(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    return ByValue


def _plain_tensor(obj: Any) -> Any:
    # Other subclasses, and tensors without plain storage, pickle themselves.
    strided = isinstance(obj, Tensor) and obj.layout == torch.strided and not obj.is_meta
    if strided and type(obj) in (Tensor, torch.nn.Parameter):
        plain = obj.detach().cpu()
        if plain.untyped_storage().nbytes() != plain.nbytes:
            plain = plain.clone(memory_format=torch.contiguous_format)
        return plain.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return NotImplemented


def _answered(value: Any) -> bytes:
    with suppress(pickle.PicklingError, AttributeError, TypeError):
        return _dumps(value, _Pickler)
    return _dumps(value, _by_value())


def _dumps(value: Any, pickler: type[pickle.Pickler] = pickle.Pickler) -> bytes:
    buffer = BytesIO()
    pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


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
        message = ("ok", _answered(do()))
    except BaseException:  # noqa: BLE001 - sys.exit too; the caller raises it again
        message = ("error", traceback.format_exc().encode())
    sys.stdout.flush()  # this worker may be killed before it exits
    with suppress(BrokenPipeError):
        pipe.send_bytes(_dumps(message))


def _follow_parent() -> None:
    """End this worker and all it started when the caller dies."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
