"""FastDeploy's real ResourceManagerV1 as an actor of tests/world: thousands of events of each seed, laws after each.

A seed that fails is printed with its line, which runs in an environment as `fastdeploy_trees.run_inside` makes it:
PYTHONPATH=$FASTDEPLOY_26:. ENABLE_V1_KVCACHE_MANAGER=1 ENABLE_V1_KVCACHE_SCHEDULER=1 PYTHONHASHSEED=0.
"""

from collections import Counter

import pytest

from tests.world import real_host  # noqa: F401  (first: it activates the overlay)
from tests.world.fastdeploy_host import LOSSES
from tests.world.test_world import test_a_seed_replays_event_for_event  # noqa: F401
from tests.world.world import Run, line, try_run

SEEDS, EVENTS = range(24), range(3000)
LOST = dict.fromkeys(LOSSES, 15) | {"lost in schedule": 2}
FEW_LOST = dict.fromkeys(LOSSES, 2)
ENDS = {"finished": 300, "aborted": 10, "preempted": 10, "resets": 10}
FINDS = {"found on device": 400, "found on host": 50, "waited for a prefill": 2}
ROLES = {"found on device": 400, "found on host": 100, "fetched": 500, "found": 50, "finished": 100, "aborted": 5}
ANSWERS = {"answered 200": 5, "answered 499": 10, "answered 500": 10, "answered 502": 10, "preempted": 5}
SCENARIOS = {
    # scenario: least counts over all seeds
    "real": LOST | ENDS | FINDS | {"garbled images": 3},
    "real updates": FEW_LOST | {"finished": 100, "aborted": 10, "updates": 100, "dropped batches": 3},
    "real file": LOST | ENDS | FINDS,
    "real attention_store": LOST | ENDS | FINDS | {"found on host": 0},
    "real roles": FEW_LOST | ROLES | ANSWERS | {"paused prefill": 10, "paused decode": 10},
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_seed_breaks_a_law(scenario):
    totals = Counter()
    for seed in SEEDS:
        run = Run(scenario, seed, EVENTS)
        result = try_run(run)
        assert result.error is None, f"{result.error}\n{line(run)}"
        totals.update({name: count for part in result.outcome for name, count in part})
    print(scenario, totals)
    assert {name: totals[name] for name, least in SCENARIOS[scenario].items() if totals[name] < least} == {}
