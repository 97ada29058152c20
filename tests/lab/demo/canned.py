"""Results of the demo that no server made."""

from fastdeploy_kvcache_v1.lab.demo.observer import Seen
from fastdeploy_kvcache_v1.lab.demo.scenario import ASKED, COMPUTED, HOST, LARGE, RESTARTED, SMALL, setups
from fastdeploy_kvcache_v1.lab.server.client import Answer
from fastdeploy_kvcache_v1.telemetry.drawing import Cell

SETUPS = setups(2000, "/tmp/kvcache-demo")
FIRST_S = {COMPUTED: 12.0, SMALL: 6.0, LARGE: 0.25, HOST: 0.5, RESTARTED: 1.0}
SOURCES = {
    COMPUTED: (1000, 0, 0, 0),
    SMALL: (600, 400, 0, 0),
    LARGE: (100, 900, 0, 0),
    HOST: (100, 400, 500, 0),
    RESTARTED: (100, 200, 200, 500),
}
"""Of each of the six requests."""


def seen(name, label, *, is_known):
    """`is_known`: the server says where its time went and what it holds."""
    first_s, sources, kind = FIRST_S[name], SOURCES[name], label.split()[0]
    answer = Answer([], f"answer to {label}", first_s, first_s + 2, sum(sources), sum(sources[1:]))
    if not is_known:
        return Seen(answer, sources, {}, {})
    times = {"queue_s": 0.1, "storage_s": first_s / 8, "copies_s": first_s / 8, "prefill_s": first_s / 2}
    size = 33 if name in (SMALL, HOST, RESTARTED) else 132
    used = 0 if name == COMPUTED else 30
    cells = [Cell(kind, number < 9) for number in range(used)]
    tiers = {
        "device": cells + [Cell("free")] * (size - used),
        "host": (cells + [Cell("chat")] * 20 if name in (HOST, RESTARTED) else []) + [Cell("free")] * 100,
        "disk": cells + [Cell("disk")] * 7 if name in (HOST, RESTARTED) else [],
    }
    return Seen(answer, sources, times | {"first_token_s": first_s, "total_s": first_s + 2}, tiers)


def results(*, is_known=True):
    return {setup.name: [seen(setup.name, label, is_known=is_known) for label in ASKED] for setup in SETUPS}
