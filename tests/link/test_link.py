"""The link between an engine and its ranks: in any order, with ranks and engines that misbehave."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing

import pytest

from fastdeploy_kvcache_v1 import forks
from fastdeploy_kvcache_v1.contract.messages import WorkerReport
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.link import engine as engine_module
from fastdeploy_kvcache_v1.link import peer as peer_module
from fastdeploy_kvcache_v1.link.engine import EngineLink
from fastdeploy_kvcache_v1.link.messages import Gone, Hello, Memory, MessageTypes, Released, Welcome, decode, encode
from fastdeploy_kvcache_v1.link.peer import LENGTH
from fastdeploy_kvcache_v1.link.rank import RankLink
from tests.forked import ended_well, start

from .talk import SLOT_BYTES, SLOTS, TYPES, Answer, Ask

LIMIT_S = 30.0
WORD = "of this engine"


def wait_for(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what}"
        time.sleep(0.005)


class Engine:
    """An `EngineLink` and what it delivered."""

    def __init__(self, path, num_ranks=1, *, word=WORD, types=TYPES, on_message=lambda rank, message: None):
        self.heard, self.gone, self.files, self._on_message = [], [], {}, on_message
        self.link = EngineLink(path, num_ranks, types, word=word)
        kinds = (Hello, Memory, Gone, WorkerReport, Answer)
        self.link.listen(dict.fromkeys(kinds, self._take), self.gone.append)

    def _take(self, rank, message):
        if isinstance(message, Memory):
            self.forget(rank)
            self.files[rank] = message.file
        self.heard.append((rank, message))
        self._on_message(rank, message)

    def of(self, rank, kind):
        return [message for number, message in self.heard if number == rank and isinstance(message, kind)]

    def forget(self, rank):
        if rank in self.files:
            self.files.pop(rank).close()

    def close(self):
        self.link.close()
        for rank in list(self.files):
            self.forget(rank)


class Rank:
    """A `RankLink` and what it delivered."""

    def __init__(self, path, rank=0, num_ranks=1, *, word=WORD, types=TYPES):
        self.heard, self.gone = [], threading.Event()
        self.link = RankLink(path, rank, num_ranks, types, word=word)
        self.link.listen({Ask: self.heard.append}, self.gone.set)
        self.send, self.close = self.link.send, self.link.close


@pytest.fixture(autouse=True)
def guard():
    forks.guard()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "own" / "link"


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def engine(path, stack):
    return lambda *arguments, **named: stack.enter_context(closing(Engine(path, *arguments, **named)))


@pytest.fixture
def rank(path, stack):
    return lambda *arguments, **named: stack.enter_context(closing(Rank(path, *arguments, **named)))


@pytest.fixture
def process(path, stack):
    """Starts a process of `talk`."""

    def run(role, number=0, num_ranks=1, word=WORD, **pipes):
        command = [sys.executable, "-m", "tests.link.talk", role, str(path), str(number), str(num_ranks), word]
        child = stack.enter_context(subprocess.Popen(command, **pipes))
        stack.callback(child.kill)
        return child

    return run


def connected(path, *frames):
    """A connection that sends what no rank of ours would."""
    each = socket.socket(socket.AF_UNIX)
    each.settimeout(LIMIT_S)
    each.connect(os.fspath(path))
    for body in frames:
        each.sendall(LENGTH.pack(len(body)) + body)
    return each


def hello(rank=0, num_ranks=1, *, version=TYPES.version, word=WORD):
    return encode(Hello(version, rank, num_ranks, 17, word))


def is_closed_by_engine(each):
    try:
        while each.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


# ---- order of starts, messages


@pytest.mark.parametrize("engine_is_first", [True, False])
def test_ranks_and_engine_start_in_any_order_and_lose_nothing(engine, rank, engine_is_first):
    first = engine(2) if engine_is_first else None
    ranks = [rank(number, 2) for number in (0, 1)]
    for number, each in enumerate(ranks):
        for count in range(50):
            each.send(Answer(100 * number + count))
    made = first or engine(2)
    wait_for(lambda: all(len(made.of(number, Answer)) == 50 for number in (0, 1)), "all answers")
    for number in (0, 1):
        assert isinstance(made.of(number, object)[0], Hello)
        assert [each.number for each in made.of(number, Answer)] == [*range(100 * number, 100 * number + 50)]
    assert made.link.is_complete
    asked = [Ask(count, os.urandom(200_000)) for count in range(20)]
    for each in asked:
        assert made.link.send(each) == []
    assert made.link.send(Ask(99), rank=1) == []
    wait_for(lambda: len(ranks[1].heard) == 21 and len(ranks[0].heard) == 20, "all questions")
    assert ranks[0].heard == asked
    assert ranks[1].heard == [*asked, Ask(99)]


def test_what_is_sent_to_a_rank_that_is_not_there_is_lost_and_it_is_named(engine, rank):
    made = engine(2)
    assert made.link.send(Ask(1)) == [0, 1]
    late = rank(1, 2)
    wait_for(lambda: made.of(1, Hello), "a rank")
    assert made.link.send(Ask(2)) == [0]
    assert not made.link.is_complete
    wait_for(lambda: late.heard, "a question")
    assert late.heard == [Ask(2)]


def test_an_engine_may_answer_a_rank_at_its_hello(engine, rank):
    made = engine(on_message=lambda number, message: isinstance(message, Hello) and made.link.send(Ask(7), number))
    early = rank()
    wait_for(lambda: early.heard, "a question")
    assert early.heard == [Ask(7)]


def test_reports_that_wait_become_one_and_nothing_is_counted_twice(engine, rank):
    early = rank()
    for step in range(1000):
        early.send(WorkerReport((), 0.5, step))
    early.send(Answer(5))
    made = engine()
    wait_for(lambda: made.of(0, WorkerReport) and made.of(0, Answer), "a report")
    assert made.of(0, WorkerReport) == [WorkerReport((), 500.0, 999)]
    early.send(WorkerReport((), 0.25, 1000))
    wait_for(lambda: len(made.of(0, WorkerReport)) == 2, "another report")
    assert made.of(0, WorkerReport)[1] == WorkerReport((), 0.25, 1000)


@pytest.mark.process
def test_memory_arrives_as_a_descriptor_of_its_bytes_that_no_fork_keeps(engine, process):
    made = engine(2)
    for number in (0, 1):
        process("rank", number, 2)
    wait_for(lambda: len(made.files) == 2, "two memories")
    for number, file in made.files.items():
        (message,) = made.of(number, Memory)
        assert (message.generation, message.slots, message.slot_bytes) == (0, SLOTS, SLOT_BYTES)
        assert os.fstat(file.fileno()).st_size == SLOTS * SLOT_BYTES
        assert os.pread(file.fileno(), 9, 0) == b"of rank %d" % number
        assert not os.get_inheritable(file.fileno())

    def use():
        assert all(file.closed for file in made.files.values())

    assert ended_well(start(use))


# ---- ranks that misbehave


@pytest.mark.process
def test_a_rank_that_dies_is_gone_and_another_one_takes_its_place(engine, process):
    made = engine(2)
    first = process("rank", 0, 2)
    process("rank", 1, 2)
    wait_for(lambda: made.link.is_complete, "both ranks")
    made.link.send(Ask(1, b"die"), 0)
    wait_for(lambda: made.gone, "the end")
    assert (first.wait(LIMIT_S), made.gone) == (3, [0])
    assert made.link.send(Ask(2)) == [0]
    process("rank", 0, 2)
    wait_for(lambda: made.link.is_complete, "the next one")
    assert made.link.send(Ask(3)) == []
    wait_for(lambda: made.of(1, Answer) == [Answer(2), Answer(3)] and made.of(0, Answer) == [Answer(3)], "answers")


@pytest.mark.process
def test_a_rank_that_stands_still_holds_nothing_up_and_is_closed(engine, process, monkeypatch, caplog):
    monkeypatch.setattr(peer_module, "MAX_UNSENT_BYTES", 1 << 20)
    made = engine(2)
    children = [process("rank", number, 2) for number in (0, 1)]
    wait_for(lambda: made.link.is_complete, "both ranks")
    children[0].send_signal(signal.SIGSTOP)
    for count in range(40):
        made.link.send(Ask(count, bytes(100_000)))
        wait_for(lambda count=count: len(made.of(1, Answer)) > count, "the other rank's answer")
    wait_for(lambda: made.gone, "the end")
    assert made.gone == [0]
    assert ["does not read" in each for each in caplog.messages] == [True]
    children[0].send_signal(signal.SIGCONT)
    assert children[0].wait(LIMIT_S) == 0, "it learns that the engine is gone for it"


def test_an_engine_that_reads_late_gets_all_of_it(engine, rank):
    made, late = engine(), rank()
    wait_for(lambda: made.of(0, Hello), "the rank")
    with made.link._lock:  # it cannot answer, and so does not read on
        made.link._handlers[Answer] = lambda number, message: made.link.send(Ask(0)) or made._take(number, message)
        for count in range(100):
            late.send(Answer(count, bytes(50_000)))
    wait_for(lambda: len(made.of(0, Answer)) == 100, "all answers")
    assert [each.number for each in made.of(0, Answer)] == [*range(100)]


def test_a_rank_gives_up_an_engine_that_does_not_read(path, rank, monkeypatch, caplog):
    monkeypatch.setattr(peer_module, "MAX_UNSENT_FRAMES", 10)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        sender = rank()
        engine, _ = listener.accept()
        welcome = encode(Welcome(WORD))
        engine.sendall(LENGTH.pack(len(welcome)) + welcome)
        wait_for(lambda: sender.link.is_connected, "the welcome")
        for count in range(2000):
            sender.send(Answer(count, bytes(10_000)))
        assert sender.gone.wait(LIMIT_S)
        engine.close()
    assert ["does not read" in each for each in caplog.messages] == [True]


MISUSES = {
    "garbage": ([b"\xff\xfe junk"], "no message"),
    "pickle": ([pickle.dumps(print)], "no message"),
    "deep": ([b"\x91" * 100_000], "no message"),
    "unknown": ([encode(Ask(1))], "expected one of"),
    "no hello": ([encode(Answer(1))], "expected Hello"),
    "version": ([hello(version="1.0")], "speaks version 1.0, expected"),
    "word": ([hello(word="another")], "worker rank of another engine"),
    "size": ([hello(num_ranks=4)], "rank 0 of 4, expected 0 to 1 of 2"),
    "rank": ([hello(rank=2, num_ranks=2)], "rank 2 of 2, expected 0 to 1 of 2"),
    "negative": ([hello(rank=-1, num_ranks=2)], "rank -1 of 2"),
    "taken": ([hello(rank=1, num_ranks=2)], "rank 1, which is connected already"),
    "twice": ([hello(num_ranks=2), hello(num_ranks=2)], "second Hello"),
    "wrong fields": ([hello(num_ranks=2), encode(Answer("x"))], "no message"),
    "no descriptor": ([hello(num_ranks=2), encode(Memory(0, 1, 1))], "without its descriptor"),
    "flood": ([hello(num_ranks=2), *[encode(Answer(1))] * 101], "more than 100 messages in a second"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_rank_that_misbehaves_is_closed_with_one_line_and_no_other(engine, rank, path, caplog, monkeypatch, misuse):
    frames, reason = MISUSES[misuse]
    monkeypatch.setattr(engine_module, "MAX_MESSAGES_PER_S", 100)
    made, other = engine(2), rank(1, 2)
    wait_for(lambda: made.of(1, Hello), "the other rank")
    for _ in range(3):  # it tries again
        with connected(path, *frames) as each:
            assert is_closed_by_engine(each)
    lines = [each for each in caplog.messages if reason in each]
    assert (len(caplog.messages), len(lines)) == (1, 1), caplog.messages
    assert "\n" not in lines[0]
    assert 1 not in made.gone
    other.send(Answer(6))
    wait_for(lambda: made.of(1, Answer) == [Answer(6)], "the other's answer")


def test_a_message_above_the_limit_is_refused_before_it_is_read(engine, path, caplog):
    engine(2)
    with connected(path, hello(num_ranks=2)) as each:
        each.sendall(LENGTH.pack(peer_module.MAX_FRAME_BYTES + 1))
        assert is_closed_by_engine(each)
    assert "expected at most 16777216" in caplog.text


def test_a_connection_that_says_nothing_is_closed(engine, path, caplog, monkeypatch):
    monkeypatch.setattr(engine_module, "HELLO_S", 0.1)
    made = engine()
    with connected(path) as each:
        assert is_closed_by_engine(each)
    assert "got no Hello" in caplog.text
    assert made.gone == []


def test_descriptors_that_no_message_brings_are_closed(engine, path):
    made, before = engine(), len(os.listdir("/proc/self/fd"))
    with connected(path, hello()) as each:
        for _ in range(peer_module.MAX_FILES + 1):
            socket.send_fds(each, [b"\0"], [each.fileno()])
        assert is_closed_by_engine(each)
    wait_for(lambda: made.gone == [0], "the end")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_message_that_fails_closes_its_rank_alone(engine, rank, caplog):
    def fail(number, message):
        if message == Answer(13):
            raise RuntimeError("a bug")

    made, ranks = engine(2, on_message=fail), [rank(number, 2) for number in (0, 1)]
    ranks[0].send(Answer(13))
    ranks[1].send(Answer(14))
    assert ranks[0].gone.wait(LIMIT_S)
    wait_for(lambda: made.gone and made.of(1, Answer), "the other's answer")
    assert made.gone == [0]
    assert "a bug" in caplog.text


@pytest.mark.parametrize("reply", [b"\xff junk", encode(Released(1)), encode(Welcome("of another"))])
def test_a_rank_tries_again_until_its_own_engine_is_there(engine, rank, path, reply, caplog):
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        late = rank()
        for _ in range(2):
            other, _ = listener.accept()
            other.sendall(LENGTH.pack(len(reply)) + reply)
            other.close()
    late.send(Answer(1))
    made = engine()
    wait_for(lambda: made.of(0, Answer), "the answer")
    assert len([each for each in caplog.messages if "refuses this rank" in each]) == 1
    assert not late.gone.is_set()


# ---- engines that end


@pytest.mark.process
def test_a_killed_engine_ends_its_ranks_and_the_next_one_gets_the_path(engine, rank, process, path):
    killed = process("engine", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert killed.stdout.readline() == b"listens\n"
    old = rank()
    assert killed.stdout.readline() == b"0 Hello\n"
    left = rank(word="of the killed engine")  # it was refused so far, and tries again
    killed.kill()
    assert old.gone.wait(LIMIT_S)
    old.send(Answer(1))
    made = engine()
    new = rank()
    new.send(Answer(2))
    wait_for(lambda: made.of(0, Answer), "the answer")
    assert made.of(0, Answer) == [Answer(2)]
    assert not left.link.is_connected


@pytest.mark.process
def test_a_fork_of_the_engine_keeps_no_rank_and_no_socket(engine, rank, path):
    """Or the ranks would not see the end of the engine, before its API processes have ended."""
    made, connected_rank = engine(), rank()
    wait_for(lambda: made.of(0, Hello), "the rank")
    read, write = os.pipe()

    def use():
        os.close(write)
        os.read(read, 1)  # until the engine has gone

    child = start(use)
    os.close(read)
    made.close()
    assert connected_rank.gone.wait(LIMIT_S)
    assert not path.parent.exists()
    os.close(write)
    assert ended_well(child)


def test_an_engine_that_closes_removes_its_own_path_alone(engine, path):
    first = engine()
    path.unlink()
    second = engine()
    first.close()
    assert path.is_socket()
    second.close()
    assert not path.parent.exists()


def test_closing_is_idempotent_and_what_is_sent_afterwards_is_dropped(engine, rank):
    made, each = engine(), rank()
    wait_for(lambda: made.of(0, Hello), "the rank")
    each.close()
    each.close()
    each.send(Answer(1))
    wait_for(lambda: made.gone == [0], "the end")
    made.close()
    made.close()
    assert made.link.send(Ask(1)) == [0]
    assert not each.gone.is_set()


def test_a_place_that_cannot_have_a_socket_is_refused(path):
    (path / "not empty").mkdir(parents=True)
    path.parent.chmod(0o700)
    with pytest.raises(ConfigError, match="cannot make the socket"):
        EngineLink(path, 1, TYPES, word=WORD)


# ---- versions


def test_other_fields_are_another_version():
    assert MessageTypes((Ask,), (Answer,)).version != TYPES.version == MessageTypes((Answer,), (Ask,)).version


@pytest.mark.parametrize("body", [b"", b"\xc0", encode(Answer(1))[:-1], encode(Answer(1)) + b"0", encode(Answer(None))])
def test_what_is_no_message_is_a_value_error(body):
    assert decode(TYPES.to_engine, encode(Answer(1))) == Answer(1)
    with pytest.raises(ValueError, match="got"):
        decode(TYPES.to_engine, body)
