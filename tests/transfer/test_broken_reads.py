"""Reads of SocketPlane that are cut off: by a cancel, a dead or stopped peer, an ended lease, an overwritten block."""

import struct
import threading
import time
from contextlib import closing

import msgspec
import pytest

from fastdeploy_kvcache_v1.errors import RemoteReadError
from fastdeploy_kvcache_v1.transfer.read_protocol import ReadRequest
from tests.fault_proxy import Fault, FaultProxy
from tests.transfer.peer import (
    BLOCK_BYTES,
    CANARY,
    NUM_BLOCKS,
    soon,
)
from tests.transfer.reader import EVERYTHING, fields_of, through, whole_blocks

pytestmark = pytest.mark.process


class SlowReader:
    """A read through a proxy that lets something through, and then nothing more until it is told to."""

    def __init__(self, ours, address):
        self.proxy = FaultProxy(fields_of(address)[2])
        self.source = ours.open(through(self.proxy, address))
        self.tensors = ours.tensors
        self.failure = None
        self._thread = threading.Thread(target=self._read)
        self.proxy.fault = Fault.SLOW
        self._thread.start()
        while not self.has_begun():
            time.sleep(0.001)

    def has_begun(self):
        return any((tensor != CANARY).any() for tensor in self.tensors)

    def _read(self):
        try:
            self.source.read("all", whole_blocks(EVERYTHING, EVERYTHING), soon())
        except RemoteReadError as error:
            self.failure = error

    def join(self):
        self._thread.join(20)
        assert not self._thread.is_alive()

    def close(self):
        self.proxy.close()
        self.source.close()
        self.join()


def refill(tensors):
    for tensor in tensors:
        tensor[:] = CANARY


def test_no_byte_arrives_after_a_cancel(shared_peer, ours):
    """The slots are given out again at once: canaries of the next owner stay."""
    reader = SlowReader(ours, shared_peer.address)
    with closing(reader):
        reader.source.close()
        refill(ours.tensors)
        reader.proxy.fault = Fault.NONE
        reader.join()
        assert reader.failure is not None
        with closing(ours.open(shared_peer.address)) as source:  # all that was under way has passed by now
            source.read("all", whole_blocks([0], [0], regions=[0]), soon())
        ours.tensors[0][0] = CANARY
        assert ours.is_untouched()


def test_a_peer_that_dies_in_a_read_fails_it_and_leaves_the_slots_alone(own_peer, ours):
    reader = SlowReader(ours, own_peer.address)
    with closing(reader):
        own_peer.kill()
        reader.proxy.fault = Fault.NONE
        reader.join()
        assert reader.failure is not None
        refill(ours.tensors)
        reader.source.close()
        assert ours.is_untouched()


def test_a_peer_that_stands_still_fails_the_read_by_its_deadline_for_good(own_peer, ours):
    with closing(ours.open(own_peer.address)) as source:
        own_peer.stop()
        with pytest.raises(RemoteReadError, match="in time"):
            source.read("all", whole_blocks(EVERYTHING, EVERYTHING), time.monotonic() + 0.3)
        refill(ours.tensors)
        own_peer.go_on()
        assert own_peer.ask("num_refused") >= 0  # it goes on
        with pytest.raises(RemoteReadError, match="in time"):
            source.read("all", whole_blocks([0], [0]), soon())
        assert ours.is_untouched()


def test_a_lease_that_ends_during_a_read_fails_it(own_peer, ours):
    reader = SlowReader(ours, own_peer.address)
    with closing(reader):
        own_peer.ask("revoke", "all")
        reader.proxy.fault = Fault.NONE
        reader.join()
        assert reader.failure is not None
        assert "lease" in str(reader.failure)


def test_bytes_that_are_written_during_a_read_are_found(own_peer, ours):
    """Half of the request is on its way when the peer computes over it."""
    reader = SlowReader(ours, own_peer.address)
    with closing(reader):
        own_peer.ask("overwrite")
        reader.proxy.fault = Fault.NONE
        reader.join()
        assert "checksum" in str(reader.failure)


def test_a_reader_that_stands_still_does_not_keep_the_peer_from_closing(own_peer, ours):
    with closing(ours.open(own_peer.address)) as source:
        request = ReadRequest("all", False, struct.pack("<3q", 0, 0, NUM_BLOCKS * BLOCK_BYTES))
        source._channel.send_frame(msgspec.msgpack.encode(request), soon())
        source._channel.receive_bytes(12, soon())  # the rest is stuck between the two
        own_peer.ask("close")
        own_peer.ask("close")
