"""The store process: what moves between memory of several ranks and a store, and what a store that fails leaves."""

import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from fastdeploy_kvcache_v1.link.messages import encode
from fastdeploy_kvcache_v1.storage import process as module
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.messages import LoadDone, QueryDone, StoreDone, TouchDone
from fastdeploy_kvcache_v1.storage.namespace import block_key
from fastdeploy_kvcache_v1.storage.parts import Parts
from fastdeploy_kvcache_v1.storage.process import Limits
from tests.storage import store_host
from tests.storage.mapped_pages import mapped_bytes, needs_mapping_ahead
from tests.storage.store_host import LIMIT_S, NUM_SLOTS, StoreHost, forget_kinds, hashes, install
from tests.storage.values import BLOCK_BYTES, VALUE_BYTES, block_hash, empty, namespace, sealed

pytestmark = pytest.mark.process

SOON = pytest.approx(0, abs=LIMIT_S)
NO_HURRY = Limits(answer_s=LIMIT_S, first_pause_s=0.05, longest_pause_s=0.2)


@pytest.fixture
def start(tmp_path, monkeypatch, request):
    """`start(ranks=2)`: hosts on one store, closed at the end."""
    install(tmp_path, monkeypatch)

    def start(directory=tmp_path / "store", limits=NO_HURRY, **options):
        made = StoreHost(directory, limits=limits, **options)
        request.addfinalizer(made.close)
        return made

    yield start
    monkeypatch.undo()
    forget_kinds()


def other_backend(host):
    """A connection of another server to the same values."""
    space = replace(namespace(), num_parts=host.parts.num_parts)
    return FileBackend(host.directory / "kv", space, capacity_bytes=1 << 30)


# ---- what moves


@needs_mapping_ahead
def test_pages_of_the_slots_are_mapped_before_their_first_use(start, monkeypatch):
    monkeypatch.setattr(store_host, "NUM_SLOTS", 20_000_000 // VALUE_BYTES)  # more than one stretch
    host = start(ranks=2, starts=False)
    for rank in range(2):
        host.use_memory(rank)
        host.memories[rank][:: mmap.PAGESIZE] = bytes(-(-len(host.memories[rank]) // mmap.PAGESIZE))  # as a rank does
    host.process.use_namespace(namespace())
    host.wait_until_it_serves()
    whole = sum(-(-len(memory) // mmap.PAGESIZE) * mmap.PAGESIZE for memory in host.memories.values())
    host.wait_until(lambda: mapped_bytes("test-host", host.process.pid) == whole)
    assert host.store(1, 2).num_written == 2


@pytest.mark.parametrize(
    # Ranks, heads of the model (None: latent), parts of a block.
    ("ranks", "heads", "parts"),
    [(1, 4, 1), (2, 4, 2), (4, 2, 2), (4, None, 1), (3, 2, 3)],
)
def test_what_one_server_stores_another_one_loads(start, ranks, heads, parts):
    first, second = start(ranks=ranks, heads=heads), start(ranks=ranks, heads=heads)
    assert first.parts == Parts(ranks, parts)
    assert first.store(0, 1, 2, 3) == StoreDone("s", 4, 4 * parts * VALUE_BYTES, SOON)
    assert second.query(0, 1, 2, 3, 4) == QueryDone("q", 4, SOON)
    assert second.load(0, 1, 2, 3) == LoadDone("l", 4, num_bytes=4 * parts * VALUE_BYTES, seconds=SOON)
    assert second.holds((0, 1, 2, 3), at=8)
    values = [path for path in (first.directory / "kv").rglob("*.*") if path.parent.name != "kv"]
    assert len([path for path in values if len(path.name) == 66]) == 4 * parts, "equal bytes of ranks are stored once"


def test_servers_that_part_blocks_in_other_ways_share_nothing(start):
    """The same key would be of other heads."""
    first, second = start(ranks=4, heads=2), start(ranks=4, heads=4)
    first.store(0, 1)
    assert second.query(0, 1).num_stored == second.load(0, 1).num_arrived == 0
    assert second.store(0, 1).num_written == 2
    assert (first.load(0, 1).num_arrived, first.holds((0, 1), at=8)) == (2, True)


def test_what_is_stored_is_not_written_again(start):
    host = start(ranks=2, heads=2)
    host.store(0, 1)
    assert host.store(0, 1, 2, 3).num_written == 2
    done = host.store(0, 1, 2, 3)
    assert (done.num_written, done.num_bytes, done.error) == (0, 0, None)


def test_part_0_is_written_last_and_questions_ask_for_it_alone(start):
    host = start(ranks=3, heads=3)
    host.store(0, 1)
    others, first = ([block_key(block, part) for block in hashes((0, 1)) for part in parts] for parts in ((1, 2), (0,)))
    assert host.calls("put") == [others, first]
    assert host.query(0, 1).num_stored == 2
    assert host.calls("count_stored")[-1] == first


@pytest.mark.parametrize("full", [True, False])
def test_block_without_all_other_parts_gets_no_part_0(start, full):
    host = start(ranks=2, heads=2)
    host.breaks(put="full" if full else "disk broken")
    done = host.store(0, 1)
    assert (done.num_written, done.num_refused, done.error) == (0, 2 * full, None if full else "disk broken")
    host.breaks()
    assert host.calls("put") == [[block_key(block, 1) for block in hashes((0, 1))]]
    assert host.query(0, 1).num_stored == 0
    assert host.store(0, 1).num_written == 2


@pytest.mark.parametrize("num_stored", [0, 1, 3, 5])
def test_loads_end_at_the_first_block_that_is_missing(start, num_stored):
    """Two threads read every other value."""
    host = start(ranks=2, heads=2)
    for number in (*range(num_stored), 6):
        host.store(number)
    done = host.load(*range(7))
    assert (done.num_arrived, done.is_damaged, done.error) == (num_stored, False, None)
    assert host.holds(range(num_stored), at=8)
    assert host.query(6).num_stored == 1, "what lies behind stays"


@pytest.mark.parametrize("part", [0, 1])
def test_block_whose_part_is_missing_is_missing_until_it_is_stored_again(start, part):
    host = start(ranks=2, heads=2)
    host.store(0, 1, 2, 3)
    backend = other_backend(host)
    backend.remove([block_key(block_hash(2), part)])
    assert host.query(0, 1, 2, 3).num_stored == (2 if part == 0 else 4)
    assert host.load(0, 1, 2, 3).num_arrived == 2
    assert host.query(0, 1, 2, 3).num_stored == 2
    host.store(0, 1, 2, 3)
    assert (host.query(0, 1, 2, 3).num_stored, host.load(0, 1, 2, 3).num_arrived) == (4, 4)
    backend.close()


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("what", ["a flipped bit", "another block", "another namespace", "nothing"])
def test_a_block_with_wrong_bytes_is_a_miss_and_is_forgotten(start, part, what):
    host = start(ranks=2, heads=2)
    host.store(0, 1, 2, 3)
    backend = other_backend(host)
    key = block_key(block_hash(1), part)
    (value,) = empty(1)
    if what == "a flipped bit":
        assert backend.get([key], [value]) == 1
        value[100] ^= 1
    elif what == "another block":
        assert backend.get([block_key(block_hash(0), part)], [value]) == 1
    elif what == "another namespace":
        value[:] = sealed(key, namespace(model="n").digest)
    backend.remove([key])
    assert backend.put([key], [value]) == 1
    done = host.load(0, 1, 2, 3)
    assert (done.num_arrived, done.is_damaged, done.error) == (1, True, None)
    assert backend.count_stored([key]) == 0
    assert host.query(0, 1).num_stored == 1
    host.store(0, 1, 2, 3)
    done = host.load(0, 1, 2, 3)
    assert (done.num_arrived, done.is_damaged) == (4, False)
    backend.close()


def test_all_parts_of_blocks_that_are_in_use_are_touched(start):
    host = start(ranks=2, heads=2)
    host.store(0, 1)
    backend = other_backend(host)
    names = [
        host.directory / "kv" / backend.namespace_digest / key[:2] / key
        for key in (block_key(block, part) for block in hashes((0, 1)) for part in (0, 1))
    ]
    for name in names:
        os.utime(name, (1, 1))
    assert host.touch(0, 1, 2) == TouchDone("t", 2)
    assert all(name.stat().st_mtime > 1 for name in names)
    backend.close()


def test_a_new_namespace_has_none_of_the_old_blocks(start):
    host = start()
    host.store(0, 1)
    host.process.use_namespace(namespace(weight_epoch="1"))
    assert host.query(0, 1).num_stored == 0
    assert host.load(0, 1).num_arrived == 0
    host.process.use_namespace(namespace())
    assert host.load(0, 1).num_arrived == 2


def test_commands_end_in_the_namespace_in_which_they_began(start):
    host = start()
    host.breaks(put="hang")
    host.fill((0, 1))
    host.begin_store(0, 1)
    host.wait_until(lambda: host.calls("put"))
    host.process.use_namespace(namespace(weight_epoch="1"))
    host.breaks()
    assert host.answer().num_written == 2
    assert host.query(0, 1).num_stored == 0
    host.process.use_namespace(namespace())
    assert host.query(0, 1).num_stored == 2


def test_ranks_with_other_bytes_of_one_part_store_a_part_each(start, caplog):
    """A model whose ranks were thought to hold the same: a warning, and every rank gets its own bytes back."""
    host = start(ranks=2)
    host.fill((0, 1))
    other = bytes([99]) * BLOCK_BYTES
    host.memories[1][VALUE_BYTES : VALUE_BYTES + BLOCK_BYTES] = other
    host.begin_store(0, 1)
    assert "hold different bytes" in host.answer().error
    host.wait_until_it_serves()
    host.begin_store(0, 1)
    assert host.answer() == StoreDone("s", 2, 4 * VALUE_BYTES, SOON)
    assert host.load(0, 1).num_arrived == 2
    assert (host.slot(0, 9), host.slot(1, 9)) == (host.content(0, 1), other)
    assert [line for line in caplog.messages if "different bytes" in line] == [caplog.messages[0]]
    host.kill()
    host.wait_until(lambda: not host.process.is_serving)
    host.wait_until_it_serves()
    assert host.query(0, 1).num_stored == 2, "another process goes on so"


# ---- a store that fails, hangs, or is killed

LANES = {"query": "count_stored", "load": "get", "store": "put"}


def begin(host, what):
    {
        "query": lambda: host.process.query("q", hashes((0, 1))),
        "load": lambda: host.begin_load(0, 1),
        "store": lambda: host.begin_store(0, 1),
    }[what]()


@pytest.mark.parametrize("what", LANES)
@pytest.mark.parametrize(("fault", "told"), [("the store is down", "the store is down"), ("bug", "RuntimeError")])
def test_what_the_store_raises_is_an_answer_and_the_process_stays(start, what, fault, told):
    host = start()
    host.store(0, 1)
    pid = host.process.pid
    host.breaks(**{LANES[what]: fault})
    begin(host, what)
    assert told in host.answer().error
    host.breaks()
    begin(host, what)
    assert (host.answer().error, host.process.pid) == (None, pid)


@pytest.mark.parametrize("what", LANES)
def test_a_lane_that_hangs_stops_no_other(start, what):
    host = start()
    host.store(0, 1)
    num_before = len(host.calls(LANES[what]))
    host.breaks(**{LANES[what]: "hang"})
    begin(host, what)
    host.wait_until(lambda: len(host.calls(LANES[what])) > num_before)
    answers = []
    for other in LANES.keys() - {what}:
        begin(host, other)
        answers.append(host.answer())
    assert {type(each).operation for each in answers} == LANES.keys() - {what}
    assert all(each.error is None for each in answers)
    host.breaks()
    assert host.answer().error is None


@pytest.mark.parametrize("what", LANES)
@pytest.mark.parametrize("how", ["hangs", "stands still"])
def test_a_store_that_does_not_answer_in_time_is_killed_and_started_again(start, caplog, what, how):
    host = start()
    host.store(0, 1)
    host.process._limits = replace(NO_HURRY, answer_s=0.5)
    first = host.process.pid
    num_before = len(host.calls(LANES[what]))
    host.breaks(**{LANES[what]: "hang"})
    if how == "hangs":
        begin(host, what)
        begin(host, what)
        host.wait_until(lambda: len(host.calls(LANES[what])) > num_before)
    else:
        host.stop()
        begin(host, what)
        begin(host, what)
    for _ in range(2):
        assert f"the store process was lost: no answer to a {what} in" in host.answer().error
        assert not is_running(first), "only then its slots may be used for others"
    host.process._limits = NO_HURRY
    host.breaks()
    host.wait_until_it_serves()
    assert host.process.pid != first
    begin(host, what)
    assert host.answer().error is None
    assert caplog.messages[0].endswith("another one starts in 0 s")


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("what", LANES)
def test_commands_fail_when_the_process_is_killed_and_the_next_one_serves(start, what):
    host = start()
    host.store(0, 1)
    num_before = len(host.calls(LANES[what]))
    host.breaks(**{LANES[what]: "hang"})
    begin(host, what)
    host.wait_until(lambda: len(host.calls(LANES[what])) > num_before)
    host.kill()
    assert "the store process was lost: it has ended" in host.answer().error
    host.breaks()
    host.wait_until_it_serves()
    begin(host, what)
    assert host.answer().error is None


def test_no_byte_arrives_in_a_slot_after_its_load_has_failed(start):
    """Kills at points in time that differ: what is in the slots then stays."""
    host = start()
    host.store(*range(8))
    for number in range(12):
        host.wait_until_it_serves()
        host.begin_load(*range(8))
        time.sleep(number / 4000)
        host.kill()
        done = host.answer()
        assert done.error is None or done.num_arrived == 0
        for slot in range(8, NUM_SLOTS):
            host.memories[0][slot * VALUE_BYTES : (slot + 1) * VALUE_BYTES] = bytes(VALUE_BYTES)
        host.wait_until(lambda: not host.process.is_serving)
        host.wait_until_it_serves()
        assert all(not any(host.slot(0, slot)) for slot in range(8, NUM_SLOTS))


def test_while_no_process_serves_everything_is_answered_at_once(start):
    host = start(limits=Limits(first_pause_s=1e6, longest_pause_s=1e6))
    host.kill()
    host.wait_until(lambda: not host.process.is_serving)
    for what in LANES:
        begin(host, what)
        assert "the store process was lost" in host.answer().error
    host.process.touch("t", hashes((0,)))
    assert "the store process was lost" in host.answer().error
    host.wait_until(lambda: host.process.pid is None)


def test_pauses_double_until_a_load_or_a_store_succeeds(start, caplog, monkeypatch):
    host = start(limits=Limits(first_pause_s=0.01, longest_pause_s=0.04))
    pauses = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *given: pauses.append(given[1] if given else text))
    for number in range(6):
        host.query(0)
        if number == 4:
            host.store(0)
        host.kill()
        host.wait_until(lambda number=number: len(pauses) > number + (number >= 4))
        host.wait_until_it_serves()
    assert pauses == [0.01, 0.02, 0.04, 0.04, "the store process works again", 0.01, 0.02]


@pytest.mark.parametrize("fault", ["the store is down", "hang"])
def test_a_store_that_cannot_be_opened_is_tried_again_by_another_process(start, fault):
    host = start(limits=Limits(start_s=1.0, first_pause_s=0.05, longest_pause_s=0.1), starts=False)
    host.breaks(open=fault)
    host.use_memory(0)
    host.process.use_namespace(namespace())
    host.wait_until(lambda: len(host.calls("open")) > 4)
    assert not host.process.is_serving
    host.breaks()
    host.wait_until_it_serves()
    assert host.store(0).num_written == 1


@pytest.mark.parametrize("what", ["load", "store"])
def test_a_store_that_may_write_late_is_ended_before_its_failure_is_told(start, what):
    host = start()
    host.store(0, 1)
    first = host.process.pid
    host.breaks(**{LANES[what]: "transfer failed", "late": True})
    begin(host, what)
    assert "the store process was lost: transfer failed" in host.answer().error
    assert not is_running(first)
    host.breaks()
    host.wait_until_it_serves()
    assert host.load(0, 1).num_arrived == 2


@pytest.mark.parametrize("escapes", [False, True])
def test_processes_of_the_store_end_before_its_failure_is_told(start, escapes):
    """Of its process group they are killed, and one of another group is waited for."""
    host = start(starts=False)
    host.breaks(child="escapes" if escapes else "stays")
    host.use_memory(0)
    host.process.use_namespace(namespace())
    host.wait_until_it_serves()
    writers = [int(path.name.partition("-")[2]) for path in host.directory.glob("writer-*")]
    assert len(writers) == 4, "of each connection"
    host.breaks(get="hang")
    host.begin_load(0)
    host.wait_until(lambda: host.calls("get"))
    host.kill()
    host.wait_until(lambda: not host.process.is_serving)
    if escapes:
        assert isinstance(host.query(0), QueryDone), "the load is not told before the writers have ended"
        for writer in writers:
            os.kill(writer, signal.SIGKILL)
    assert "the store process was lost: it has ended" in host.answer().error
    last = host.memories[0][-1]
    host.breaks()
    host.wait_until_it_serves()
    assert host.memories[0][-1] == last


def test_what_cannot_be_started_is_tried_again(start, monkeypatch):
    host = start(limits=Limits(first_pause_s=0.01, longest_pause_s=0.02), starts=False)
    tried = []

    def fail(*command, **options):
        tried.append(command)
        raise OSError("no memory")

    monkeypatch.setattr(module.subprocess, "Popen", fail)
    host.use_memory(0)
    host.process.use_namespace(namespace())
    host.wait_until(lambda: len(tried) > 2)
    assert "cannot be started: no memory" in host.query(0).error
    monkeypatch.undo()
    install(host.directory, monkeypatch)
    host.wait_until_it_serves()


@pytest.mark.parametrize("said", [StoreDone("s", 1), b"\xff"])
def test_a_process_that_says_what_it_must_not_is_ended(start, said):
    host = start()
    first, child = host.process.pid, host.process._child
    child.peer._arrived += frame(said)  # as if it had arrived before the next answer
    assert "it says what it must not" in host.query(0).error
    host.wait_until_it_serves()
    assert host.process.pid != first


def frame(message):
    body = message if isinstance(message, bytes) else encode(message)
    return len(body).to_bytes(4, "little") + body


# ---- memory and life


def test_memory_that_is_dropped_is_unmapped_before_that_is_told(start):
    host = start(ranks=2, heads=2)
    host.store(0, 1)
    host.breaks(get="hang")
    host.begin_load(0, 1)
    host.wait_until(lambda: len(host.calls("get")) > 0)
    first = host.process.pid
    host.process.drop_memory(1, lambda: host._heard("released"))
    assert "the host tier has lost its memory" in host.answer().error
    assert host.answer() == "released"
    assert not is_running(first)
    assert "the host tier has lost its memory" in host.query(0).error
    host.breaks()
    host.use_memory(1)
    host.wait_until_it_serves()
    assert host.load(0, 1).num_arrived == 2
    assert host.holds((0, 1), at=8)
    host.process.drop_memory(0)
    host.process.drop_memory(1, lambda: host._heard("released"))
    assert host.answer() == "released"


def test_memory_that_comes_again_takes_the_place_of_the_earlier_one(start):
    host = start()
    host.store(0, 1)
    first, earlier = host.process.pid, host.memories[0]
    host.use_memory(0)
    host.wait_until(lambda: host.process.pid not in (None, first))
    host.wait_until_it_serves()
    assert (host.load(0, 1).num_arrived, host.holds((0, 1), at=8)) == (2, True)
    assert not any(earlier[8 * VALUE_BYTES :]), "nothing went there"


def test_nothing_starts_before_all_ranks_have_memory(start):
    host = start(ranks=2, heads=2, starts=False)
    host.process.use_namespace(namespace())
    host.use_memory(0)
    assert "has not started" in host.query(0).error
    assert host.process.pid is None
    host.use_memory(1)
    host.wait_until_it_serves()


def test_a_store_that_is_under_way_at_the_end_is_finished(start):
    host = start()
    host.breaks(put="hang")
    host.fill((0, 1))
    host.begin_store(0, 1)
    host.wait_until(lambda: host.calls("put"))
    host.breaks()
    host.close()
    host.close()
    assert host.answers.empty(), "no answer comes afterwards"
    other = start()
    assert other.query(0, 1).num_stored == 2


@pytest.mark.parametrize("hangs", ["put", "open"])
def test_a_store_that_hangs_at_the_end_is_killed(start, monkeypatch, hangs):
    monkeypatch.setattr(module, "STOP_TIMEOUT_S", 0.2)
    host = start(starts=False)
    host.breaks(**{hangs: "hang"})
    host.use_memory(0)
    host.process.use_namespace(namespace())
    host.wait_until(lambda: host.process.pid)
    if hangs == "put":
        host.wait_until_it_serves()
        host.begin_store(0)
    host.wait_until(lambda: host.calls(hangs))
    pid = host.process.pid
    monkeypatch.setattr(module, "STOP_TIMEOUT_S", LIMIT_S if hangs == "open" else 0.2)
    host.close()
    assert not is_running(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_stop_servers_do_not_end_the_process(start, number):
    host = start()
    pid = host.process.pid
    os.kill(pid, number)
    assert host.store(0).num_written == 1
    assert host.process.pid == pid
    assert os.getsid(pid) == pid


ENGINE = """
import pathlib, sys, time
from tests.storage import store_host
from tests.storage.store_host import StoreHost
host = StoreHost(pathlib.Path(sys.argv[1]), backend="file")
print(host.process.pid, flush=True)
time.sleep(600)
"""


def test_the_process_dies_with_an_engine_that_is_killed(tmp_path):
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True
    )
    with engine:
        pid = int(engine.stdout.readline())
        fd = os.pidfd_open(pid)
        engine.kill()
    assert select.select([fd], [], [], LIMIT_S)[0]
    os.close(fd)


def test_the_process_ends_with_its_connection(start):
    host = start()
    first = host.process.pid
    host.process._child.peer.socket.shutdown(socket.SHUT_WR)
    host.wait_until(lambda: host.process.pid not in (None, first))
    host.wait_until_it_serves()
    assert not is_running(first)


REAPER = """
import os, pathlib, signal, sys, threading, time
from tests.storage import store_host
from tests.storage.store_host import StoreHost
host = StoreHost(pathlib.Path(sys.argv[1]), backend="file")
def reap():
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.001)
threading.Thread(target=reap, daemon=True).start()
for _ in range(3):
    host.store(0)
    first = host.process.pid
    host.kill()
    host.wait_until(lambda: host.process.pid not in (None, first))
    host.wait_until_it_serves()
host.close()
print("served again")
os._exit(0)
"""


def test_the_end_is_seen_where_another_part_of_the_engine_reaps_children(tmp_path):
    """As gunicorn's master does, which is FastDeploy's engine."""
    done = subprocess.run(
        [sys.executable, "-c", REAPER, str(tmp_path / "store")], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.stdout == "served again\n", done.stderr


FORK = """
import contextlib, os, pathlib, sys, time
from fastdeploy_kvcache_v1 import forks
from tests.storage import store_host
from tests.storage.store_host import StoreHost
forks.guard()
host = StoreHost(pathlib.Path(sys.argv[1]), backend="file")
host.memories.pop(0).close()  # of the rank
child = os.fork()
if not child:
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    print([name for name in names if "test-host" in name or name.startswith("socket")], flush=True)
    os._exit(0)
os.waitpid(child, 0)
host.begin_store(0)
host.answer()
print(host.query(0).num_stored, flush=True)
host.close()
"""


def test_a_forked_child_keeps_neither_memory_nor_connection(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path / "store")], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.stdout.splitlines() == ["[]", "1"], done.stderr


def test_a_deadline_counts_from_when_its_command_is_the_first_of_its_lane():
    lane = module.Lane()
    assert lane.deadline is None
    lane.add("first", 10.0, now=100.0)
    lane.add("second", 1.0, now=105.0)
    assert lane.deadline == 110.0
    assert lane.answered(now=108.0) == "first"
    assert lane.deadline == 109.0
    lane.answered(now=108.5)
    lane.add("third", 2.0, now=200.0)
    assert lane.deadline == 202.0
