"""Real servers with a real Mooncake between them: a hit on one machine's memory from another one."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.e2e.server_process import refusal, started, wait_until
from tests.e2e.test_storage import CACHED, ask, assert_they_share, end, flags, wait_stored
from tests.fault_proxy import Fault, FaultProxy
from tests.mooncake_master import Master, needs_mooncake
from tests.mooncake_peer import PeerProxies, needs_compiler
from tests.mooncake_peer import environment as behind_proxies

pytestmark = [pytest.mark.process, needs_mooncake()]


@pytest.fixture
def master(tmp_path):
    master = Master(tmp_path)
    yield master
    master.kill()


@pytest.fixture
def start(tmp_path, master):
    """A server on the master, as a context."""

    def started_server(name, *others, address=None, variables=None):
        environment = {**master.environment(address), **(variables or {})}
        return started(tmp_path / name, *flags("mooncake", *others), environment=environment)

    return started_server


def test_two_servers_share_blocks_and_one_of_another_dtype_does_not(start):
    with start("one") as one, start("two") as two, start("other", "--cache-dtype", "bfloat16") as three:
        assert_they_share(one, two)
        assert one.metrics()["storage_blocks_total{direction=load}"] == CACHED / 16
        assert ask(three)[1] == 0
        assert (three.metrics()["storage_queries_total"], three.metrics()["storage_found_blocks_total"]) == (1, 0)
        for server in (one, two, three):
            end(server)


def prompt(number):
    return [1 + (step * 7 + number) % 250 for step in range(600)]


def shared(one, two, prompts):
    """Until `two` finds a prompt that `one` has computed just now; its tokens are right whether it does or not."""

    def found():
        each = next(prompts)
        tokens, _ = ask(one, each)
        again, cached = ask(two, each)
        assert again == tokens
        return cached > 0

    wait_until(found, "a hit on what the other server computed")


def stored_by(server, tokens):
    """The answer of `server`, and whether the whole prompt is stored: after failures it leaves the store alone."""
    before = server.metrics()
    answer, _ = ask(server, tokens)

    def grown(name):
        return server.metrics()[name] - before[name]

    def num_stored():
        return grown("storage_blocks_total{direction=store}")

    def has_failed():
        return grown("storage_failures_total{direction=store}") or grown("storage_skipped_store_blocks_total")

    wait_until(lambda: num_stored() >= CACHED // 16 or has_failed(), "stored blocks, or a failure")
    return answer, num_stored() >= CACHED // 16


def test_a_failing_master_costs_hits_and_no_token(start, master):
    """Behind a proxy that hangs and resets; frozen; killed while blocks are loaded: the same tokens, and an end."""
    prompts = map(prompt, itertools.count())
    proxy = FaultProxy(master.port)
    with start("one") as one, start("two", "--storage-prefetch", "timeout", address=proxy.address) as two:
        known = {number: ask(one, prompt(1000 + number))[0] for number in range(5)}
        wait_stored(one, 5 * CACHED // 16)
        shared(one, two, prompts)
        for number, fault in enumerate((Fault.SLOW, Fault.HANG, Fault.RESET)):
            proxy.fault = fault
            assert ask(two, prompt(1000 + number))[0] == known[number], fault
        assert proxy.faults_met
        failures = ("storage_query_failures_total", "storage_failures_total{direction=load}")
        wait_until(lambda: any(two.metrics()[name] for name in failures), "a question or a load that failed")
        proxy.fault = Fault.NONE
        shared(one, two, prompts)
        master.freeze()
        assert ask(two, prompt(1003))[0] == known[3]
        master.thaw()
        shared(one, two, prompts)
        proxy.fault = Fault.SLOW
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(ask, two, prompt(1004))
            wait_until(lambda: two.metrics()["requests{state=waiting}"] or answer.done(), "a request that loads")
            master.kill()
            assert answer.result()[0] == known[4]
        proxy.fault = Fault.NONE
        master.start()
        shared(one, two, prompts)
        end(one)
        master.freeze()
        assert ask(two, prompt(2000))[0]
        assert two.stop() == 0, two.stderr
        two.assert_nothing_left()
    proxy.close()


def met_while_asked(one, two, peer, fault, prompts):
    """Whether `two`, asked what `one` has stored, met the fault. It may load nothing just after other failures."""
    tokens = next(prompts)
    known, is_stored = stored_by(one, tokens)
    if not is_stored:
        return False
    met = peer.faults_met
    peer.set_fault(fault)
    assert ask(two, tokens)[0] == known, fault
    is_met = peer.faults_met > met
    peer.set_fault(Fault.NONE)
    return is_met


@needs_compiler()
def test_a_failing_peer_costs_hits_and_no_token(tmp_path, start, master):
    """The port that blocks are read from and written to is slow, changes bytes, hangs, and resets connections."""
    prompts = map(prompt, itertools.count())
    others = (each[::-1] for each in map(prompt, itertools.count()))  # nobody has stored them
    with start("one", variables=behind_proxies(tmp_path)) as one, start("two") as two:
        ask(one, prompt(200))  # which makes it give memory; nobody reaches that yet
        wait_until(lambda: one.metrics()["storage_failures_total{direction=store}"] >= 1, "a store that fails")
        peer = PeerProxies(psutil.Process(one.process.pid))
        assert len(peer) >= 2, "it has ports for data and for questions"
        shared(one, two, prompts)
        for fault in (Fault.SLOW, Fault.FLIP, Fault.HANG, Fault.RESET):
            wait_until(lambda fault=fault: met_while_asked(one, two, peer, fault, others), f"a load that meets {fault}")
            peer.set_fault(Fault.NONE)
            shared(one, two, prompts)
        metrics = two.metrics()
        assert metrics["storage_damaged_blocks_total"] >= 1
        assert metrics["storage_failures_total{direction=load}"] >= 2
        assert metrics["host_loading_blocks"] == 0
        end(one)
        end(two)
        peer.close()


def test_a_setting_that_is_missing_is_one_line_at_the_start(capsys, monkeypatch):
    monkeypatch.setenv("MOONCAKE_MASTER_SERVER_ADDR", "")
    assert "mooncake needs metadata_server" in refusal(capsys, *flags("mooncake"))
