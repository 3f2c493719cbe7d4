"""Sweeps of message passing in compiled loops (`message_passing.py` says what they compute).

All costs lie in one row, as `Layout` has it. A message has a number per row or column of its edge's
table; `codes` says which of them each choice of a variable has. Integers of a graph:

    variables [v]         OWN_AT, N_CHOICES, and links FIRST_LINK to AFTER to END: edges to
                          variables of lower, then of higher index
    links [l]             EDGE, SIDE: 0 if the variable has its rows, else 1
    tables [e]            TABLE_AT, N_ROWS, N_COLUMNS
    sides [e, side]       VARIABLE, CODES_AT, MESSAGE_AT: of the message to this side
"""

from __future__ import annotations

import numpy as np

from autopar.arrays import Array, Codes
from autopar.passes.solvers.problem import compiled

OWN_AT, N_CHOICES, FIRST_LINK, AFTER, END = range(5)
EDGE, SIDE = range(2)
TABLE_AT, N_ROWS, N_COLUMNS = range(3)
VARIABLE, CODES_AT, MESSAGE_AT = range(3)
MOST_PASSES = 1000


@compiled
def sweep_there(
    row: Array, variables: Codes, links: Codes, tables: Codes, sides: Codes, codes: Codes,
    shares: Array, messages: Array, chosen: Codes, scratch: Array,
) -> float:  # fmt: skip
    """Send messages to later variables, and choose; returns what the choice costs."""
    belief, costs, due = scratch
    total = 0.0
    for v in range(len(variables)):
        of = variables[v]
        _believe(row, of, links, sides, codes, messages, belief)
        n, own_at = of[N_CHOICES], of[OWN_AT]
        costs[:n] = row[own_at : own_at + n]
        for k in range(of[FIRST_LINK], of[AFTER]):
            _add_given(row, n, links[k], tables, sides, codes, chosen, costs)
        given = costs[:n].copy()
        for k in range(of[AFTER], of[END]):
            _add_message(n, links[k], sides, codes, messages, costs)
        best = int(costs[:n].argmin())
        chosen[v] = best
        total += given[best]
        for k in range(of[AFTER], of[END]):
            _send(row, n, links[k], tables, sides, codes, shares[v], messages, belief, due)
    return total


@compiled
def sweep_back(
    row: Array, variables: Codes, links: Codes, tables: Codes, sides: Codes, codes: Codes,
    shares: Array, messages: Array, scratch: Array, slack: Array,
) -> float:  # fmt: skip
    """Send messages to earlier variables; returns a lower bound on all totals.

    `slack` gets how much more the bound is with each choice, of one variable after the other;
    an array of length 0 gets nothing.
    """
    belief, _, due = scratch
    bound, at = 0.0, len(slack)
    for v in range(len(variables) - 1, -1, -1):
        of = variables[v]
        n = of[N_CHOICES]
        _believe(row, of, links, sides, codes, messages, belief)
        least = belief[:n].min()
        if least == np.inf:
            return np.inf
        bound += least
        for x in range(n):
            belief[x] -= least
        at -= n
        if len(slack):
            slack[at : at + n] = belief[:n]
        for k in range(of[FIRST_LINK], of[AFTER]):
            least = _send(row, n, links[k], tables, sides, codes, shares[v], messages, belief, due)
            bound += least
            if len(slack):
                mine = slack[at : at + n]
                _add_slack(row, n, links[k], tables, sides, codes, messages, least, due, mine)
    return bound


@compiled
def _add_slack(
    row: Array, n: int, link: Codes, tables: Codes, sides: Codes, codes: Codes,
    messages: Array, least: float, due: Array, slack: Array,
) -> None:  # fmt: skip
    """Add what the message just sent would be higher by, had it been of one choice alone."""
    table, here = tables[link[EDGE]], sides[link[EDGE], link[SIDE]]
    table_at, n_rows, n_columns = table[TABLE_AT], table[N_ROWS], table[N_COLUMNS]
    made_at = sides[link[EDGE], 1 - link[SIDE]][MESSAGE_AT]
    n_here = n_rows if link[SIDE] == 0 else n_columns
    due[:n_here] = np.inf
    for r in range(n_rows):
        for c in range(n_columns):
            p, q = (r, c) if link[SIDE] == 0 else (c, r)
            sent = messages[made_at + q]
            if sent < np.inf:
                due[p] = min(due[p], row[table_at + r * n_columns + c] - sent)
    for x in range(n):
        place = codes[here[CODES_AT] + x]
        got = messages[here[MESSAGE_AT] + place]
        if got < np.inf:  # else the belief is infinite, and so is the slack
            slack[x] += due[place] - got - least


@compiled
def pay_edges(
    row: Array, variables: Codes, links: Codes, tables: Codes, sides: Codes, codes: Codes,
    shares: Array, messages: Array, scratch: Array, paid: Array,
) -> None:  # fmt: skip
    """Write messages by which no edge costs less than nothing to `paid`, after a sweep back: edges
    get from each variable what it sent them its message for."""
    belief, _, due = scratch
    paid[:] = messages
    for v in range(len(variables)):
        of = variables[v]
        _believe(row, of, links, sides, codes, messages, belief)
        for k in range(of[FIRST_LINK], of[AFTER]):
            table, here = tables[links[k, EDGE]], sides[links[k, EDGE], links[k, SIDE]]
            n_here = table[N_ROWS] if links[k, SIDE] == 0 else table[N_COLUMNS]
            _least_of_places(of[N_CHOICES], here, codes, belief, n_here, due)
            for p in range(n_here):
                paid[here[MESSAGE_AT] + p] -= shares[v] * due[p] if due[p] < np.inf else -np.inf


@compiled
def reduce_edges(row: Array, tables: Codes, sides: Codes, messages: Array, left: Array) -> Array:
    """Write what edges cost at least in each row and column, less their messages, to `left`, in the
    places of messages; returns the least of each edge."""
    least = np.full(len(tables), np.inf)
    left[:] = np.inf
    for e in range(len(tables)):
        table_at, n_rows, n_columns = tables[e]
        to_rows, to_columns = sides[e, 0, MESSAGE_AT], sides[e, 1, MESSAGE_AT]
        sent = messages[to_columns : to_columns + n_columns]
        of_columns = left[to_columns : to_columns + n_columns]
        for r in range(n_rows):
            given, best = messages[to_rows + r], np.inf
            if given == np.inf:
                continue
            costs = row[table_at + r * n_columns : table_at + (r + 1) * n_columns]
            for c in range(n_columns):
                if sent[c] < np.inf:
                    cost = costs[c] - given - sent[c]
                    best = cost if cost < best else best
                    of_columns[c] = cost if cost < of_columns[c] else of_columns[c]
            left[to_rows + r] = best
            least[e] = min(least[e], best)
    return least


@compiled
def improve(
    row: Array, variables: Codes, links: Codes, tables: Codes, sides: Codes, codes: Codes,
    chosen: Codes, scratch: Array,
) -> None:  # fmt: skip
    """Change one variable at a time while the total falls.

    Costs may be negative, so rounding could go in circles: passes are bounded.
    """
    costs = scratch[0]
    for _ in range(MOST_PASSES):
        is_better = False
        for v in range(len(variables)):
            of = variables[v]
            n, own_at = of[N_CHOICES], of[OWN_AT]
            costs[:n] = row[own_at : own_at + n]
            for k in range(of[FIRST_LINK], of[END]):
                _add_given(row, n, links[k], tables, sides, codes, chosen, costs)
            best = int(costs[:n].argmin())
            if costs[chosen[v]] - costs[best] > 1e-12 * abs(costs[best]):
                chosen[v], is_better = best, True
        if not is_better:
            return


@compiled
def _believe(
    row: Array, of: Codes, links: Codes, sides: Codes, codes: Codes, messages: Array,
    belief: Array,
) -> None:  # fmt: skip
    n, own_at = of[N_CHOICES], of[OWN_AT]
    belief[:n] = row[own_at : own_at + n]
    for k in range(of[FIRST_LINK], of[END]):
        _add_message(n, links[k], sides, codes, messages, belief)


@compiled
def _add_message(
    n: int, link: Codes, sides: Codes, codes: Codes, messages: Array, out: Array
) -> None:
    """Add the message that a link brings to each of n choices."""
    side = sides[link[EDGE], link[SIDE]]
    codes_at, message_at = side[CODES_AT], side[MESSAGE_AT]
    for x in range(n):
        out[x] += messages[message_at + codes[codes_at + x]]


@compiled
def _add_given(
    row: Array, n: int, link: Codes, tables: Codes, sides: Codes, codes: Codes, chosen: Codes,
    out: Array,
) -> None:  # fmt: skip
    """Add the costs of a link to each of n choices, given the choice at its other end."""
    table, here = tables[link[EDGE]], sides[link[EDGE], link[SIDE]]
    there = sides[link[EDGE], 1 - link[SIDE]]
    place = codes[there[CODES_AT] + chosen[there[VARIABLE]]]
    if link[SIDE] == 0:
        at, step = table[TABLE_AT] + place, table[N_COLUMNS]
    else:
        at, step = table[TABLE_AT] + place * table[N_COLUMNS], 1
    codes_at = here[CODES_AT]
    for x in range(n):
        out[x] += row[at + step * codes[codes_at + x]]


@compiled
def _least_of_places(
    n: int, here: Codes, codes: Codes, belief: Array, n_here: int, due: Array
) -> None:
    """Write the least belief of the choices in each place of a side."""
    due[:n_here] = np.inf
    for x in range(n):
        place = codes[here[CODES_AT] + x]
        due[place] = min(due[place], belief[x])


@compiled
def _send(
    row: Array, n: int, link: Codes, tables: Codes, sides: Codes, codes: Codes, share: float,
    messages: Array, belief: Array, due: Array,
) -> float:  # fmt: skip
    """Set the message from a variable to the other end of a link; returns what its least number
    was, which becomes 0."""
    table, here = tables[link[EDGE]], sides[link[EDGE], link[SIDE]]
    table_at, n_rows, n_columns = table[TABLE_AT], table[N_ROWS], table[N_COLUMNS]
    n_here, n_there = n_rows, n_columns
    if link[SIDE] == 1:
        n_here, n_there = n_columns, n_rows
    _least_of_places(n, here, codes, belief, n_here, due)
    for p in range(n_here):
        if due[p] < np.inf:  # a message that is infinite made the belief so
            due[p] = share * due[p] - messages[here[MESSAGE_AT] + p]
    made_at = sides[link[EDGE], 1 - link[SIDE]][MESSAGE_AT]
    made = messages[made_at : made_at + n_there]
    made[:] = np.inf
    for r in range(n_rows):
        costs = row[table_at + r * n_columns : table_at + (r + 1) * n_columns]
        if link[SIDE] == 0:
            if due[r] < np.inf:
                for c in range(n_columns):
                    total = due[r] + costs[c]
                    made[c] = total if total < made[c] else made[c]
        else:
            least = np.inf
            for c in range(n_columns):
                total = due[c] + costs[c]
                least = total if total < least else least
            made[r] = least
    least = made.min()
    if least < np.inf:
        for p in range(n_there):
            made[p] -= least
    return least
