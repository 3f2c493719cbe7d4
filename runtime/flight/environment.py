"""Times that users set by environment variables."""

from __future__ import annotations

import os

from autopar.errors import OptionError


def seconds_in(variable: str) -> float | None:
    """The seconds that an environment variable sets; None if it is not set.

    Raises `OptionError` if it is no number above 0.
    """
    given = os.environ.get(variable)
    if given is None:
        return None
    try:
        time_s = float(given)
    except ValueError:
        time_s = 0.0
    if not time_s > 0:
        raise OptionError(f"{variable}={given!r} is not a number of seconds")
    return time_s
