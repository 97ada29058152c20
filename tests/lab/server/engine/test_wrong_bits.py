"""What equal tokens prove: one wrong bit in any tier, or one row that a copy leaves out, changes the answer.

Each case first has the right answer from the tier that it spoils afterwards.
"""

import random
import tempfile
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_kvcache_v1.config import WritePolicy
from fastdeploy_kvcache_v1.contract.messages import SWAP_IN
from fastdeploy_kvcache_v1.lab.model.ranks import ONE_RANK
from fastdeploy_kvcache_v1.lab.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.lab.model.vision import PATCH, Image, PlacedImage
from fastdeploy_kvcache_v1.lab.server.worker.messages import LINK_TYPES
from fastdeploy_kvcache_v1.lab.server.worker.outside import RankStorage
from fastdeploy_kvcache_v1.link.engine import EngineLink
from fastdeploy_kvcache_v1.storage.attention_store.tasks import ANSWERS
from fastdeploy_kvcache_v1.storage.backends import make_tier
from fastdeploy_kvcache_v1.storage.engine.link import StorageLink
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from fastdeploy_kvcache_v1.worker.ops.copies import CpuCopies
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.lab.server.engine.family_engine import BLOCK, FAMILIES, FamilyEngine
from tests.lab.server.engine.test_families_between_servers import Pair
from tests.storage.attention_store.sdk.attentionstore_sdk import sdk
from tests.storage.attention_store.stand_in import installed
from tests.storage.values import namespace
from tests.world import store as world_store
from tests.world.chance import Faults
from tests.world.streams import Clock

PROMPT = [40 + (7 * at) % 50 for at in range(60)]
NUM_CACHED = len(PROMPT) // BLOCK
"""Blocks of the prompt that a second request finds."""

CASES = [
    *((family, False, 1) for family in FAMILIES),
    *((family, number % 2 == 0, 2) for number, family in enumerate(FAMILIES)),
]
"""Layout, drafts, ranks."""

over_all_layouts = pytest.mark.parametrize(("family", "mtp", "size"), CASES)


def main_layers(engine, mtp):
    """A draft layer's bytes choose guesses, not tokens: test_checksum spoils those."""
    return engine.controllers[0].layout.num_layers - mtp


def ask(engine, **options):
    return engine.ask(PROMPT, max_tokens=8, **options)


class Bit:
    """Turned over while it is entered."""

    def __init__(self, memory, rng):
        self._flat = memory.reshape(-1)
        self._at, self._mask = rng.randrange(len(self._flat)), 1 << rng.randrange(8)

    def __enter__(self):
        self._flat[self._at] ^= self._mask

    def __exit__(self, *error):
        self._flat[self._at] ^= self._mask


def device_row(engine, rng, layers, slot):
    """What one role of one layer keeps of a block, on some rank."""
    return rng.choice(rng.choice(engine.controllers).transfers.device_rows[rng.randrange(layers)]).array[slot]


def host_row(engine, rng, layers, slot):
    controller = rng.choice(engine.controllers)
    block, layout = controller.host_pool.slot(slot), controller.layout
    return block[: layers * layout.block_bytes // layout.num_layers]


def table_of_next_request(engine):
    """Device slots of the cached blocks, once the next batch is there."""
    tables = []
    engine.before_batch = lambda batch: tables.append(list(batch.requests[0].block_table[:NUM_CACHED]))
    return tables


@over_all_layouts
def test_a_wrong_bit_in_a_device_slot_changes_the_answer(family, mtp, size):
    engine, rng = FamilyEngine(family, mtp=mtp, size=size), random.Random(family)
    expected = ask(engine)
    tables = table_of_next_request(engine)
    assert ask(engine) == expected
    assert engine.counters.device_hit_tokens == NUM_CACHED * BLOCK
    for _ in range(12):
        slot = rng.choice(tables[0])
        with Bit(device_row(engine, rng, main_layers(engine, mtp), slot), rng):
            assert ask(engine) != expected
    assert ask(engine) == expected
    engine.close()


def test_a_wrong_bit_of_an_image_changes_the_answer():
    """In the rows of its placeholders, and in itself."""
    engine, rng = FamilyEngine("gqa"), random.Random(1)
    pixels = rng.randbytes(4 * PATCH * PATCH * 3)
    images = (PlacedImage(10, Image.of(2, 2, pixels)),)
    expected = ask(engine, images=images)
    tables = table_of_next_request(engine)
    assert ask(engine, images=images) == expected
    for _ in range(6):
        with Bit(device_row(engine, rng, 2, tables[0][1]), rng):
            assert ask(engine, images=images) != expected
    engine.core.reset_cache()
    other = (PlacedImage(10, Image.of(2, 2, bytes([pixels[0] ^ 1]) + pixels[1:])),)
    assert ask(engine, images=other) != expected
    engine.close()


def host_copies(batch):
    """Host slots that the batch reads."""
    return [slot for step in batch.swap_steps for each in step.transfers if (each.source, each.target) == SWAP_IN
            for slot in each.source_slots]  # fmt: skip


def from_the_host(engine, spoil=lambda batch: None):
    """The answer, whose prefix comes from the host."""
    engine.push_out()
    engine.settle()
    before, engine.before_batch = engine.counters.host_hit_tokens, spoil
    tokens = ask(engine)
    engine.before_batch = lambda batch: None
    assert engine.counters.host_hit_tokens - before >= (NUM_CACHED - 1) * BLOCK
    engine.settle()
    return tokens


@pytest.mark.parametrize("policy", [*WritePolicy])
@over_all_layouts
def test_a_wrong_bit_in_a_host_slot_changes_the_answer(family, mtp, size, policy):
    engine, rng = FamilyEngine(family, mtp=mtp, size=size, num_host_blocks=120, policy=policy), random.Random(family)
    expected = ask(engine)
    assert [ask(engine) for _ in range(2)] == [expected] * 2, "often enough for any policy"
    assert from_the_host(engine) == expected
    for _ in range(3):
        turned = []

        def spoil(batch, turned=turned):
            if not turned and (slots := host_copies(batch)):
                turned.append(Bit(host_row(engine, rng, main_layers(engine, mtp), rng.choice(slots)), rng))
                turned[0].__enter__()

        assert from_the_host(engine, spoil) != expected
        turned[0].__exit__()
    assert from_the_host(engine) == expected
    engine.close()


class LeavesOut:
    """Copies that leave out one token's row of one role, once: of a block in device `slots`, in the given layer."""

    def __init__(self, is_in, layer, rng):
        self._is_in, self._layer, self._rng = is_in, layer, rng
        self.slots, self.done = [], False

    def layer(self, copies, stream, layer, runs, to_device):
        copied = [(run[self._is_in] + at, run[1] + at) for run in runs for at in range(run[2])]
        mine = [target for slot, target in copied if slot in self.slots]
        if self.done or not mine or self._layer:
            self._layer -= bool(mine) and not self.done
            COPY(copies, stream, layer, runs, to_device=to_device)
            return
        self.done = True
        first = layer * copies._num_roles
        targets = [target for target, _source in copies._pairs[to_device][first : first + copies._num_roles]]
        row = self._rng.choice(targets).array[self._rng.choice(mine)]
        width = len(row) // BLOCK // 4
        start = self._rng.randrange(4 * BLOCK) * width
        kept = row[start : start + width].copy()
        COPY(copies, stream, layer, runs, to_device=to_device)
        assert not np.array_equal(row[start : start + width], kept)
        row[start : start + width] = kept

    def all_layers(self, copies, stream, runs, to_device):
        for layer in range(len(copies._pairs[to_device]) // copies._num_roles):
            self.layer(copies, stream, layer, runs, to_device=to_device)


COPY = CpuCopies.layer


@pytest.fixture
def leave_out(monkeypatch):
    def install(how):
        for name in ("layer", "all_layers"):
            method = getattr(how, name)
            monkeypatch.setattr(CpuCopies, name, lambda *given, method=method: method(*given))
        return how

    return install


@pytest.mark.parametrize("is_in", [True, False], ids=["to the device", "to the host"])
@over_all_layouts
def test_a_row_that_a_copy_leaves_out_changes_the_answer(leave_out, family, mtp, size, is_in):
    runtimes = [CpuRuntime() for _ in range(size)]
    engine = FamilyEngine(family, mtp=mtp, size=size, num_host_blocks=80, runtimes=runtimes)
    rng = random.Random(f"{family} {is_in}")
    left_out = leave_out(LeavesOut(is_in, rng.randrange(main_layers(engine, mtp)), rng))
    expected = ask(engine)
    if is_in:
        assert from_the_host(engine) == expected

        def spoil(batch):
            left_out.slots = left_out.slots or list(batch.requests[0].block_table[:NUM_CACHED])

        assert from_the_host(engine, spoil) != expected
    else:
        tables = table_of_next_request(engine)
        assert ask(engine) == expected
        left_out.slots = tables[0]
        assert from_the_host(engine) != expected
    assert left_out.done
    engine.close()


class Store(world_store.Store):
    """The world's, at the end of a link for one engine after the other; it answers at once."""

    num_host_blocks = 40

    def __init__(self, num_ranks):
        world = SimpleNamespace(clock=Clock(), log=lambda *words: None, faults=Faults([]))
        super().__init__(world, [world_store.RankMemory(on_device=False) for _ in range(num_ranks)])
        self.answers, self._rng = deque(), random.Random(0)
        self.listen(self.answers.append)

    def tier(self, manager):
        settings = StorageSettings("file", prefetch="wait_complete", min_tokens=BLOCK)
        return StorageTier(manager, settings, namespace(), self)

    def serve(self, engine):
        for memory, controller in zip(self._memories, engine.controllers, strict=True):
            memory.use(controller)

    def _begin(self, call):
        super()._begin(call)
        self.answer(self._rng)


class VendorsStore:
    """The attention store by its stand-in SDK, with the agent and the link of a server."""

    num_host_blocks = 0
    settings = StorageSettings("attention_store", prefetch="wait_complete", min_tokens=BLOCK)

    def __init__(self, sockets):
        self._path = Path(sockets, "own", "link")
        self.answers = deque()

    def tier(self, manager):
        self._engine = EngineLink(self._path, 1, LINK_TYPES, word=self._path.parent.name)
        self._link = StorageLink(self._engine, ANSWERS)
        self._engine.listen(self._link.handlers, lambda rank: None)
        return make_tier(manager, self.settings, None, self._link)

    def serve(self, engine):
        (controller,) = engine.controllers
        name = namespace(layout=controller.layout, block_size=BLOCK)
        self._rank = RankStorage(self.settings, self._path, ONE_RANK, controller, name)
        while not self._link.is_ready:
            time.sleep(0.001)
        self._link.listen(self.answers.append)
        engine.storage.use_namespace(name)

    def close(self):
        self._rank.close()
        self._link.close()
        self._engine.close()


def ask_with(store, family, mtp, size):
    """A new engine over the store: its answer, and the blocks that came from there."""
    engine = FamilyEngine(
        family,
        mtp=mtp,
        size=size,
        num_host_blocks=store.num_host_blocks,
        policy=WritePolicy.WRITE_THROUGH,
        storage=lambda manager, engine: store.tier(manager),
    )
    store.serve(engine)
    core = engine.core
    recorder = engine.submit("stored", PROMPT, 8, SamplingParams(temperature=0.0))
    while not recorder.ended or store.answers or not core.storage.is_idle or not core.is_idle:
        while store.answers:
            core.on_storage(store.answers.popleft())
        if not engine.results():
            engine.settle()
    loaded = core.storage.counters.load.blocks
    for _ in range(3):  # what was copied out is stored, and that is told
        engine.settle()
        engine.results()
        while store.answers or not core.storage.is_idle:
            if store.answers:
                core.on_storage(store.answers.popleft())
            else:
                engine.results()
    store.close()
    engine.close()
    return recorder.tokens, loaded


@pytest.mark.parametrize(
    ("family", "mtp", "size"), [case for case in CASES if case[2] == 1 or case[0].startswith("gqa")]
)
def test_a_wrong_bit_in_a_stored_value_changes_the_answer(family, mtp, size):
    """Behind its seal: a store whose bytes differ from what was sealed is found out by `tests/storage/test_seal.py`."""
    store, rng = Store(size), random.Random(family)
    expected, loaded = ask_with(store, family, mtp, size)
    assert (loaded, len(store.values) >= NUM_CACHED) == (0, True)
    assert ask_with(store, family, mtp, size) == (expected, NUM_CACHED)
    blocks = list(store.values)[:NUM_CACHED]
    for _ in range(3):
        value = rng.choice(store.values[rng.choice(blocks)]).reshape(-1).view(np.uint8)
        main = len(value) * 2 // 3 if mtp else len(value)  # two layers of three
        with Bit(value[:main], rng):
            tokens, loaded = ask_with(store, family, mtp, size)
            assert (tokens != expected, loaded) == (True, NUM_CACHED)
    assert ask_with(store, family, mtp, size) == (expected, NUM_CACHED)


@pytest.mark.parametrize("family", ["gqa", "gqa, bfloat16"])
def test_a_wrong_bit_in_the_attention_store_changes_the_answer(monkeypatch, tmp_path, family):
    """Whose values have no seal."""
    rng = random.Random(family)
    with installed(monkeypatch, tmp_path / "kv") as directory, tempfile.TemporaryDirectory(prefix="kv-") as sockets:
        store = VendorsStore(sockets)
        expected, loaded = ask_with(store, family, False, 1)
        assert loaded == 0
        assert ask_with(store, family, False, 1) == (expected, NUM_CACHED)
        for _ in range(3):
            ends = rng.randrange(1, NUM_CACHED + 1) * BLOCK
            (path,) = directory.glob(f"*of*/{sdk.Tokens(PROMPT[:ends], BLOCK).name(ends // BLOCK - 1)}")
            value = np.fromfile(path, np.uint8)
            with Bit(value, rng):
                value.tofile(path)
            tokens, loaded = ask_with(store, family, False, 1)
            assert (tokens != expected, loaded) == (True, NUM_CACHED)
            value.tofile(path)
        assert ask_with(store, family, False, 1) == (expected, NUM_CACHED)


@pytest.mark.parametrize(("family", "mtp"), [(family, number % 2 == 0) for number, family in enumerate(FAMILIES)])
def test_a_wrong_bit_in_a_fetched_block_changes_the_answer(family, mtp):
    """Where decode has put it, before it reads it."""
    rng = random.Random(family)
    prompts = [[rng.randrange(200) for _ in range(5 * BLOCK + 3)] for _ in range(4)]
    alone = FamilyEngine(family, mtp=mtp, num_device_blocks=40)
    expected = [alone.ask(prompt, max_tokens=9) for prompt in prompts]
    alone.close()
    pair = Pair(family, mtp=mtp, num_device_blocks=60)
    decode = pair.decode.engine
    assert pair.run(prompts[:1], max_tokens=9) == expected[:1]
    for prompt, right in zip(prompts[1:], expected[1:], strict=True):
        turned = []

        def spoil(batch, turned=turned):
            if not turned and batch.requests and batch.requests[0].start >= 5 * BLOCK:
                slot = rng.choice(batch.requests[0].block_table[:5])
                turned.append(Bit(device_row(decode, rng, main_layers(decode, mtp), slot), rng))
                turned[0].__enter__()

        decode.before_batch = spoil
        (tokens,) = pair.run([prompt], max_tokens=9)
        assert tokens[0] == right[0], "prefill's"
        assert tokens[1:] != right[1:]
        assert turned
    assert pair.remote.ledger.totals.arrived == len(prompts)
    pair.close()
