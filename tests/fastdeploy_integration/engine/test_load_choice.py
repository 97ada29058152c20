"""What is on the host is loaded where that is sooner than computing it, as the workers' times say: what the adapter
adds to `scheduler/test_load_costs.py`. Each prompt is ten blocks and a token; at 1 s to compute one it takes 41 s.
"""

import pytest

from .by_hand import Server

PROMPT = [*range(1, 42)]
SECOND = [*range(50, 91)]
OTHERS = [*range(100, 337)]
"""It pushes everything else out of the device."""


def server_of(*on_host, **options):
    options = {"budget": 500, "seats": 16, "write_policy": "write_through", "shared_prefill_tokens": 8, **options}
    server = Server(60, 400, **options)
    server.serve(*on_host, OTHERS)
    return server


@pytest.mark.parametrize(("copy_s", "cached"), [(0.5, 40), (1.0, 40), (2.0, 12), (10.0, 0)])
def test_as_much_is_loaded_as_arrives_while_the_rest_is_computed(copy_s, cached):
    """At 2 s per token, 12 tokens come in 24 s, while 29 are computed; 16 would come in 32 s, beside 25."""
    server = server_of(PROMPT)
    server.measured(copy_s)
    assert server.serve(PROMPT) == [cached]
    assert server.counters.swap_in_blocks == cached // 4
    assert server.counters.declined_load_tokens == 40 - cached
    assert server.serve(PROMPT) == [40], "what was computed is on the device"
    server.serve(OTHERS)
    assert server.serve(PROMPT) == [cached], "what was loaded before is over"
    server.serve(OTHERS)
    server.measured(0.1)
    assert server.serve(PROMPT) == [40], "what was declined has its host copy"
    assert server.counters.swap_out_blocks == (len(PROMPT) + len(OTHERS)) // 4, "each block once"


@pytest.mark.parametrize(
    ("prompts", "max_batched", "starts"),
    [
        # All 40 tokens come in 80 s, while 80 are computed for another request.
        ([[*range(500, 580)], PROMPT], 500, [0, 40]),
        # The second one's copies begin after 24 s: 16 tokens arrive after 56 s, beside 29 + 25, 12 of them after 48 s.
        ([PROMPT, SECOND], 500, [12, 12]),
        # A batch computes 8 tokens at most, so a copy of 4 tokens may take 8 s.
        ([PROMPT], 8, [4]),
    ],
    ids=["what is computed for others hides a copy", "what is loaded for others delays it", "a batch is short"],
)
def test_what_else_the_batch_does_counts(prompts, max_batched, starts):
    server = server_of(PROMPT, SECOND, budget=max_batched)
    server.measured(2.0)
    tasks = [server.add(str(number), prompt, 1) for number, prompt in enumerate(prompts)]
    server.step()
    assert [task.prefill_start_index for task in tasks] == starts
    server.run_dry()
    declined = sum(40 - start for prompt, start in zip(prompts, starts, strict=True) if len(prompt) == 41)
    assert server.counters.declined_load_tokens == declined, "once, in however many batches the rest comes"
