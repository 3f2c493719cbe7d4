"""What happens while a mutant is read: the files it opens, what it starts, its time."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import AutoparError

MOST_S = 5.0
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "shutil.rmtree")
_seen: list[tuple[str, str]] | None = None
_is_hooked = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _seen is not None and (event == "open" or event.startswith((*_STARTS, *_CHANGES))):
        _seen.append((event, str(args[0]) if args else ""))


class TouchedError(Exception):
    """A mutant made us open, start or change what it must not."""


@contextmanager
def opening_only(may_open: Callable[[str], bool]) -> Iterator[None]:
    """Raises `TouchedError` if another file is opened, or anything is started or changed."""
    global _seen, _is_hooked
    if not _is_hooked:  # such a hook stays for good
        sys.addaudithook(_hook)
        _is_hooked = True
    events: list[tuple[str, str]] = []
    _seen = events
    try:
        yield
    finally:
        _seen = None
        for event, what in events:
            if event != "open" or not may_open(what):
                raise TouchedError(f"{event} {what}")


@dataclass
class Tally:
    """How many mutants were refused, were right, or broke the promise, with the reasons."""

    what: str
    refused: int = 0
    right: int = 0
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def take(self, name: str, use: Callable[[], str | None]) -> None:
        """Use a mutant: `use` raises an `AutoparError`, or says what is wrong, None if nothing."""
        start = time.process_time()
        try:
            fault = use()
            if fault is None:
                self.right += 1
            else:
                self.faults.append(f"{name}: {fault}")
        except AutoparError as error:
            self.refused += 1
            if len(str(error)) > 20_000:
                self.faults.append(f"{name}: the error has {len(str(error))} characters")
        except TouchedError as error:
            self.faults.append(f"{name}: touches {error}")
        except Exception:  # noqa: BLE001  (what is counted here is any other error)
            last = "".join(traceback.format_exc().splitlines(keepends=True)[-8:])
            self.faults.append(f"{name}: raw traceback\n{last}")
        taken_s = time.process_time() - start
        self.slowest_s = max(self.slowest_s, taken_s)
        if taken_s > MOST_S:
            self.faults.append(f"{name}: took {taken_s:.1f} s")

    def text(self) -> str:
        n_raw = sum("raw traceback" in fault for fault in self.faults)
        return (
            f"{self.what}: {self.refused} refused, {self.right} right, {len(self.faults)} faults, "
            f"{n_raw} raw tracebacks; slowest {self.slowest_s:.2f} s"
        )

    def check(self) -> None:
        sys.stdout.write(f"{self.text()}\n")
        assert not self.faults, "\n".join([self.text(), *self.faults[:10]])
