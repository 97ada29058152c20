"""Engine, step runner and cache controller together, over copies that end late, fail or are given up as a seed says.

The "KV" is the token itself, in every layer and role, so whatever the forward pass reads wrongly changes the output.
"""

import random

import numpy as np
import pytest

from fastdeploy_kvcache_v1.attention.base import AttentionCacheBackend, CacheLayout, RoleSpec, tensor_name
from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.model.step_runner import StepRunner
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from tests.embedded.shadow import Harness, expected_outputs, next_token
from tests.worker.chosen_runtime import ChosenRuntime

LAYERS = 3
BLOCK = 4
VOCAB = 128


class NumpyBackend(AttentionCacheBackend):
    @property
    def layout(self):
        return CacheLayout(LAYERS, tuple(RoleSpec(role, (BLOCK,), "float32") for role in ("key", "value")))

    def create_kv_cache(self, num_blocks, *, rank=0, device=0):
        return {
            tensor_name(role.role, layer, rank, device): np.full((num_blocks, BLOCK), -1, np.float32)
            for layer in range(LAYERS)
            for role in self.layout.roles
        }


def forward(sequences, caches, before_layer):
    """Writes the new tokens and reads the whole context back, layer by layer; all layers must tell the same."""
    contexts = [set() for _ in sequences]
    for layer in range(LAYERS):
        before_layer(layer)
        key, value = caches[2 * layer : 2 * layer + 2]
        for slice_ in sequences:
            for position, token in enumerate(slice_.token_ids, slice_.start):
                slot = slice_.block_table[position // BLOCK], position % BLOCK
                key[slot], value[slot] = token, token + layer
        for slice_, context in zip(sequences, contexts, strict=True):
            slots = [int(slot) for slot in slice_.block_table]
            end = slice_.start + len(slice_.token_ids)
            context.add(tuple(key[slots].ravel()[:end].astype(int).tolist()))
            context.add(tuple((value[slots].ravel()[:end].astype(int) - layer).tolist()))
    return [
        1e6 * np.eye(VOCAB, dtype=np.float32)[next_token(min(context)) if len(context) == 1 else 0]
        if slice_.needs_logits
        else None
        for slice_, context in zip(sequences, contexts, strict=True)
    ]


class Life:
    """Random requests, aborts, resets and reports, in any order that a server can bring about."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        config = KVCacheConfig(
            rng.choice([8, 9, 12]),
            rng.choice([3, 16, 40]),
            block_size=BLOCK,
            write_policy=rng.choice(list(WritePolicy)),
            write_through_threshold=rng.choice([1, 2]),
        )
        self.harness = Harness(
            config, max_num_seqs=rng.choice([1, 2, 6, 12]), max_num_batched_tokens=rng.choice([1, 3, 16, 64])
        )
        loaded = rng.choice([0.5, 1.0, 1.0])  # whether a load pays is a matter of time
        self.harness.scheduler.load_costs.blocks_to_load = lambda num_blocks, *_, **__: int(num_blocks * loaded)
        self.runtime = ChosenRuntime(seed, fail=rng.choice([0, 0.02, 0.15]), late=rng.choice([0, 0.02, 0.1]))
        self.controller = CacheController(NumpyBackend(), runtime=self.runtime)
        caches = self.controller.initialize_kv_cache(config.num_device_blocks, config.num_host_blocks)
        self.runner = StepRunner(forward, self.controller, caches, block_size=BLOCK, on_progress=self.runtime.turn)
        self.recorders = {}
        self.gone = set()

    def chance(self, probability):
        return self.rng.random() < probability

    def prompts(self, count):
        prefixes = [[self.rng.randrange(97) for _ in range(self.rng.randrange(8, 17))] for _ in range(8)]
        for index in range(count):
            prompt = self.rng.choice(prefixes) + [self.rng.randrange(97) for _ in range(self.rng.randrange(1, 6))]
            count = self.rng.randrange(1, 9)
            if self.chance(0.3) and len(prompt) + count < 22:
                prefixes.append(prompt + expected_outputs(prompt, count))
            yield f"r{index}", prompt, count

    def report(self):
        """Copies that ended between two steps, told while a batch may be in flight."""
        self.harness.core.on_report(self.runner.take_report())
        self.harness.manager.check()

    def step(self):
        core, rng = self.harness.core, self.rng
        core.step()
        if not self.harness.sent:
            return False
        batch = self.harness.sent.pop()
        if batch.requests and self.chance(0.05):
            name = rng.choice(batch.requests).request_id
            if not self.recorders[name].ended:
                self.gone.add(name)
                core.abort(name)
        if self.chance(0.02):
            core.reset_cache()
        if self.chance(0.3):
            self.report()
        result = self.runner.run(batch)
        assert result.errors == {}
        if self.chance(0.3):
            self.report()
        core.on_step_result(result)
        self.controller.check()
        self.harness.manager.check()
        return True

    def live(self, count):
        """All requests to their end; prompt and output length by name."""
        waiting = {name: (prompt, length) for name, prompt, length in self.prompts(count)}
        asked = dict(waiting)
        while waiting or not self.harness.core.is_idle:
            for _ in range(min(len(waiting), self.rng.randrange(4))):
                name, (prompt, length) = waiting.popitem()
                self.recorders[name] = self.harness.submit(name, prompt, length, SamplingParams(temperature=0))
            self.step()
        while self.step():
            pass
        return asked

    def close(self):
        self.runtime.quiet()
        self.controller.drain()
        self.report()
        while self.step():
            pass
        self.harness.manager.check_idle()
        self.controller.free()
        self.runtime.close()


@pytest.mark.parametrize("seed", range(30))
def test_no_overlap_of_events_changes_a_token(seed):
    life = Life(seed)
    asked = life.live(80)
    life.close()
    for name in asked.keys() - life.gone:
        recorder = life.recorders[name]
        if recorder.failure is None:
            assert recorder.tokens == expected_outputs(*asked[name])
        else:
            assert recorder.failure.status == 500
            assert "gave up after 3 more attempts" in recorder.failure.message


def test_a_seed_replays():
    seen = []
    for _ in range(2):
        life = Life(3)
        life.live(80)
        life.close()
        copies = life.harness.core.counters.copies[0]
        seen.append((life.runtime.now, copies.swap_in, copies.swap_out, life.gone))
    assert seen[0] == seen[1]
    assert seen[0][1].blocks > 10, "the run is only worth something if it went through what it is for"
