"""`once`: once for the same arguments, as long as the object, for frozen ones too."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.caching import once


@dataclass(frozen=True)
class Counter:
    """Counts its calls in `calls`, which copies share."""

    calls: list[tuple[int, str]] = field(default_factory=list)

    @once
    def called(self, number: int, word: str = "") -> int:
        """How many calls there were before."""
        self.calls.append((number, word))
        return len(self.calls) - 1


def test_a_method_runs_once_for_the_same_arguments() -> None:
    counter = Counter()
    assert [counter.called(*of) for of in ((1,), (2,), (1, "a"), (1,), (2,))] == [0, 1, 2, 0, 1]
    assert counter.calls == [(1, ""), (2, ""), (1, "a")]


def test_copies_start_without_results() -> None:
    counter = Counter()
    assert counter.called(1) == 0
    assert replace(counter).called(1) == 1
    assert counter.called(1) == 0
