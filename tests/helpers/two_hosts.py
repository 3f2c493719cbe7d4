"""Two hosts on one machine: network namespaces with an address each, and a link between them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress

LINK = "link0"  # of the same name in both


def why_impossible() -> str | None:
    """What this machine lacks for namespaces; None if nothing."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "iproute2 is not installed (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"autopar-probe-{os.getpid()}"
    made = _ip("netns", "add", name, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    _ip("netns", "delete", name)
    return None


class TwoHosts:
    """Hosts 0 and 1. `close` ends what runs on them, and removes them."""

    def __init__(self) -> None:
        self.names = [f"autopar-{os.getpid()}-{i}" for i in range(2)]
        self.addresses = ["10.213.0.1", "10.213.0.2"]
        try:
            for name in self.names:
                _ip("netns", "add", name)
            first, second = self.names
            _ip(
                *("link", "add", LINK, "netns", first, "type", "veth"),
                *("peer", "name", LINK, "netns", second),
            )
            for name, address in zip(self.names, self.addresses, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", LINK)
                for device in ("lo", LINK):
                    _ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.close()
            raise

    def command(self, host: int, *words: str) -> list[str]:
        """The command as it runs on a host."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def run(self, host: int, *words: str) -> subprocess.CompletedProcess[str]:
        return _run(*self.command(host, *words), check=False)

    def slow_down(self) -> str | None:
        """Make the link slow, by netem or by little bandwidth; why not, None if it is done."""
        said = ""
        for how in (["netem", "delay", "20ms"], "tbf rate 20mbit burst 32kb latency 1s".split()):
            done = [
                self.run(host, "tc", "qdisc", "add", "dev", LINK, "root", *how) for host in range(2)
            ]
            if not any(one.returncode for one in done):
                return None
            said += done[0].stderr
        return f"this kernel has neither netem nor tbf: {said}"

    def cut(self) -> None:
        _ip("-n", self.names[0], "link", "set", LINK, "down")

    def bound_tcp(self, n_retries: int) -> None:
        """A connection that is not answered fails after so many retransmissions, each later."""
        path = "/proc/sys/net/ipv4/tcp_retries2"
        for host in range(2):
            self.run(host, "sh", "-c", f"echo {n_retries} > {path}").check_returncode()

    def n_sent_bytes(self, host: int) -> int:
        return int(self.run(host, "cat", f"/sys/class/net/{LINK}/statistics/tx_bytes").stdout)

    def processes(self) -> list[int]:
        found: list[int] = []
        for name in self.names:
            found += map(int, _ip("netns", "pids", name, check=False).stdout.split())
        return found

    def close(self) -> None:
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for name in self.names:
            _ip("netns", "delete", name, check=False)


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return _run("ip", *words, check=check)


def _run(*words: str, check: bool) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, text=True, capture_output=True, timeout=30, check=check)
