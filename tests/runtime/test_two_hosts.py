"""Two hosts (`tests/helpers/two_hosts.py`): they train across a slow link, start again together
after a rank was killed, and end in bounded time when the link is cut."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples import train_resilient
from tests.helpers.nightly import nightly
from tests.helpers.two_hosts import LINK, TwoHosts, why_impossible

pytestmark = nightly
ROOT = Path(__file__).parents[2]
N_STEPS, SAVE_EVERY, STEP_TIMEOUT_S = 8, 3, 6
# Ranks notice a cut link after STEP_TIMEOUT_S, torchrun when TCP gives up: after 13 s or so.
TCP_RETRIES, BOUND_S = 5, 60.0
_LOSS = re.compile(r"batch (\d+)  loss (\S+)")


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if (reason := why_impossible()) is not None:
        pytest.skip(reason)
    both = TwoHosts()
    try:
        yield both
    finally:
        both.close()


class Job:
    """torchrun on both hosts, with one rank each."""

    def __init__(
        self, hosts: TwoHosts, folder: Path, *script: str, restarts: int = 0,
        timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.agents = folder, list[subprocess.Popen[bytes]]()
        for host, address in enumerate(hosts.addresses):
            torchrun = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                *("--nproc-per-node=1", f"--max-restarts={restarts}", "--rdzv-backend=c10d"),
                *(f"--rdzv-endpoint={hosts.addresses[0]}:29511", f"--local-addr={address}"),
                f"--rdzv-conf=is_host={1 - host}",
                *("examples/train_resilient.py", "--folder", str(folder / "run"), *script),
            ]
            env = os.environ | {
                "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": LINK,
                "AUTOPAR_FLIGHT_DIR": str(self.notes(host)),
            }  # fmt: skip
            if timeout_s is not None:
                env["AUTOPAR_STEP_TIMEOUT_S"] = str(timeout_s)
            with self._file(host).open("wb") as file:
                command = hosts.command(host, *torchrun)
                self.agents.append(
                    subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file)
                )

    def notes(self, host: int) -> Path:
        return self.folder / f"notes-{host}"

    def _file(self, host: int) -> Path:
        return self.folder / f"host-{host}.txt"

    def said(self, host: int) -> str:
        return self._file(host).read_text(errors="replace")

    def wait(self, within_s: float) -> list[int]:
        """Exit codes of both."""
        end_s = time.monotonic() + within_s
        return [agent.wait(max(0.1, end_s - time.monotonic())) for agent in self.agents]

    def wait_for(self, text: str, within_s: float = 120.0) -> None:
        """Until host 0 says it."""
        end_s = time.monotonic() + within_s
        while text not in self.said(0):
            assert time.monotonic() < end_s and self.agents[0].poll() is None, self.said(0)
            time.sleep(0.1)


def losses_in(text: str) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in _LOSS.findall(text)]


def test_they_train_over_a_slow_link_and_start_again_together(
    hosts: TwoHosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_resilient.train(tmp_path / "alone", N_STEPS, SAVE_EVERY, None)
    wanted = dict(losses_in(capsys.readouterr().out))
    if (why := hosts.slow_down()) is not None:
        pytest.skip(why)
    script = ("--steps", str(N_STEPS), "--save-every", str(SAVE_EVERY), "--kill", "1:5")
    job = Job(hosts, tmp_path, *script, restarts=1)
    assert job.wait(240.0) == [0, 0], job.said(0) + job.said(1)
    found = losses_in(job.said(0))
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    for step, loss in found:
        assert loss == pytest.approx(wanted[step], rel=0, abs=1e-10)
    # 10 steps gather and reduce an embedding of 64 KiB, at least; finding each other takes less.
    assert min(hosts.n_sent_bytes(host) for host in range(2)) > 1_000_000


def test_a_cut_link_ends_every_process_and_is_diagnosed(hosts: TwoHosts, tmp_path: Path) -> None:
    hosts.bound_tcp(TCP_RETRIES)
    script = ("--steps", "1000000", "--save-every", "1000000")
    job = Job(hosts, tmp_path, *script, timeout_s=STEP_TIMEOUT_S)
    job.wait_for("batch 20 ")
    hosts.cut()
    codes = job.wait(BOUND_S)
    assert 0 not in codes and hosts.processes() == []
    for rank in range(2):
        said = job.said(rank)
        stuck = f"rank {rank} was in one action or call for more than {STEP_TIMEOUT_S} s"
        assert stuck in said
        assert re.search(rf"rank {rank}: step \d+, stage 0, action \S+, \w+ over dp", said)
    folders = (str(job.notes(0)), str(job.notes(1)))
    diagnosed = subprocess.run(
        [sys.executable, "-m", "autopar", "diagnose", *folders],
        cwd=ROOT, text=True, capture_output=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert "all ranks are in the same call" in diagnosed or "behind the others" in diagnosed
    assert len(re.findall(r"rank \d: step \d+, stage 0, action", diagnosed)) == 2
