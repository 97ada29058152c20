"""All orders of events of prefill and decode ranks, as far as some states go: every law of `World` in each of them.

`SMALL_SCOPE_STATES=100000` looks further. A broken law is told with the events that lead to it.
"""

import os

import pytest

from tests.transfer.small_scope import Scope, search

MOST_STATES = int(os.environ.get("SMALL_SCOPE_STATES", "200"))
"""Of each scope."""


@pytest.mark.parametrize(
    "scope",
    [
        Scope(),
        Scope("ab", faults=1),
        *(Scope("ab", begun=begun) for begun in (11, 13)),
        *(Scope(faults=1, begun=begun) for begun in (0, 6, 11, 13)),
        *(Scope(prefills=2, faults=1, begun=begun) for begun in (0, 18, 22)),
        *(Scope(decodes=2, faults=1, begun=begun) for begun in (0, 15, 20)),
        *(Scope(looks_at_leases=False, faults=1, begun=begun) for begun in (11, 13)),
    ],
    ids=str,
)
def test_no_order_of_events_breaks_a_law(scope):
    assert search(scope, most_states=MOST_STATES).states > MOST_STATES // 2
