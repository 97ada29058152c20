"""Connections, reads and their faults in memory: nothing moves until somebody takes one of the `moves`.

No thread, socket or sleep.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

from fastdeploy_kvcache_v1.errors import KVCacheError, RemoteReadError
from fastdeploy_kvcache_v1.transfer import network
from fastdeploy_kvcache_v1.transfer.block_reader import ReadEnd
from fastdeploy_kvcache_v1.transfer.control_link import LinkClosed, LinkOpened
from fastdeploy_kvcache_v1.transfer.geometry import require_compatible
from fastdeploy_kvcache_v1.transfer.grants import Grants
from fastdeploy_kvcache_v1.transfer.messages import Hello, Ping, Refused, Welcome, decode, encode
from fastdeploy_kvcache_v1.transfer.plane import DataPlane

Move = tuple[str, Callable[[], None]]


class MemoryPlane(Grants, DataPlane):
    """`tensors` are `[slots, bytes]` arrays. `looks_at_leases`: a peer refuses what is not granted, as sockets do."""

    looks_at_leases = True

    def __init__(self, name, tensors):
        super().__init__()
        self.name, self.tensors = name, tensors
        self.is_dead = False

    def register(self, regions):
        pass

    def address(self):
        return self.name.encode()

    def open(self, address, deadline):
        raise NotImplementedError

    def close(self):
        self.is_dead = True


class Link:
    """One end. As `ControlLink`, with what the peer has sent in `coming`; None there is the end of the link."""

    def __init__(self, net, name, ours, theirs, inbox):
        self.net, self.name, self.peer = net, name, name
        self.geometry, self.instance = theirs.geometry, theirs.instance
        self.address = theirs.address if isinstance(theirs, Hello) else b""
        self.inbox = inbox
        self.coming = deque()
        self.wanted = ()
        self.is_closed = False
        self.other = None

    def start(self):
        self.inbox.put((self, LinkOpened()))

    def send(self, message):
        if not self.is_closed and not self.other.is_closed:
            self.other.coming.append(encode(message))
            self.net.sent.append(self.other.coming[-1])

    def want(self, leases):
        self.wanted = leases

    def close(self, reason):
        if not self.is_closed:
            self.is_closed = True
            self.coming.clear()
            self.inbox.put((self, LinkClosed(reason)))
            if not self.other.is_closed:
                self.other.coming.append(None)

    def deliver(self):
        frame = self.coming.popleft()
        if frame is None:
            self.close("the link broke: the peer closed the connection")
            return
        try:
            self.inbox.put((self, decode(frame)))
        except KVCacheError as error:
            self.close(f"the link broke: {error}")


class Reader:
    """As `BlockReader`: reads one span of its first job whenever it is told to."""

    def __init__(self, net, plane, address, settings, on_end):
        self.net, self.plane, self.on_end = net, plane, on_end
        self.source = net.planes[address.decode()]
        self.jobs = deque()
        self.num_read = 0
        net.readers.append(self)

    def submit(self, job):
        self.jobs.append(job)

    def cancel(self, lease):
        if self.jobs and self.jobs[0].lease == lease:
            self.num_read = 0
        self.jobs = deque(job for job in self.jobs if job.lease != lease)

    def close(self):
        self.jobs.clear()
        self.num_read = 0
        if self in self.net.readers:
            self.net.readers.remove(self)

    def step(self):
        job = self.jobs[0]
        try:
            if self.num_read < len(job.spans):
                self._copy(job.lease, job.spans[self.num_read])
                self.num_read += 1
                if self.num_read < len(job.spans):
                    return
            self._require_open(job.lease)
        except RemoteReadError as error:
            self._end(ReadEnd(job, str(error)))
        else:
            self._end(ReadEnd(job, None))

    def fail(self):
        self._end(ReadEnd(self.jobs[0], "the read failed"))

    def _end(self, end):
        self.jobs.popleft()
        self.num_read = 0
        self.on_end(end)

    def _copy(self, lease, span):
        self._require_open(lease)
        region, there, here, count = span
        theirs, ours = self.source.tensors[region].reshape(-1), self.plane.tensors[region].reshape(-1)
        ours[here : here + count] = theirs[there : there + count]

    def _require_open(self, lease):
        if self.source.is_dead:
            raise RemoteReadError("the peer is gone")
        if self.source.looks_at_leases and not self.source.is_open(lease):
            raise RemoteReadError(f"lease {lease!r} is not open")


class Starting:
    """As a thread that was started and has not run."""

    def __init__(self, net, target, args):
        self.net, self.target, self.args = net, target, args

    def start(self):
        self.net.starting.append(self)

    def is_alive(self):
        return self in self.net.starting

    def join(self):
        if self.is_alive():
            self.run()

    def run(self):
        self.net.starting.remove(self)
        self.target(*self.args)


class MemoryNetwork:
    """Every connection of a world. Ranks say where they listen by port; hosts do not matter."""

    rounds = 100
    """More turns than anything needs."""

    def __init__(self):
        self.listeners = {}
        self.planes = {}
        self.starting = []
        self.links = []
        self.readers = []
        self.sent = []
        """Messages, since it was last emptied."""
        self.held = set()
        """Kinds of moves that nobody makes now: connect, deliver, read."""

    def ends(self):
        """What a desk is given."""
        return network.Network(self._greet, self._listen, partial(Reader, self), self._thread)

    def plane(self, name, tensors):
        made = self.planes[name] = MemoryPlane(name, tensors)
        return made

    # ---- what moves

    def moves(self) -> list[Move]:
        """Everything that can happen next where nothing goes wrong, by name."""
        found = [
            *((f"connect {number}", each.run) for number, each in enumerate(self.starting)),
            *((f"deliver {each.name}", each.deliver) for each in self.links if each.coming),
            *((f"read {number}", each.step) for number, each in enumerate(self.readers) if each.jobs),
        ]
        return [move for move in found if move[0].split()[0] not in self.held]

    def wants_to_read(self):
        """Jobs that were asked for and have not ended."""
        return [job for reader in self.readers for job in reader.jobs]

    def faults(self) -> list[Move]:
        """Everything that can go wrong next, by name."""
        found: list[Move] = []
        for end in self.links:
            if not end.is_closed and not end.other.is_closed:
                found.append((f"break {end.name}", partial(end.close, "the link broke")))
            if end.coming and end.coming[0] is not None:
                found.append((f"lose {end.name}", end.coming.popleft))
                found.append((f"double {end.name}", partial(end.coming.insert, 1, end.coming[0])))
            if len(end.coming) > 1 and None not in list(end.coming)[:2] and end.coming[0] != end.coming[1]:
                found.append((f"swap {end.name}", partial(_swap, end.coming)))
        found += [(f"fail read {number}", each.fail) for number, each in enumerate(self.readers) if each.jobs]
        return found

    def settle(self) -> bool:
        """Let everything move that can; False where nothing could."""
        moved = False
        while moves := self.moves():
            moves[0][1]()
            moved = True
        return moved

    def ping(self):
        """Every live peer gives a sign."""
        for end in self.links:
            if not end.is_closed and not end.other.is_closed:
                end.other.inbox.put((end.other, Ping(list(end.wanted))))

    # ---- what desks call

    def _thread(self, *, target, args, name, daemon):
        assert daemon, "an interpreter that ends would wait for a peer"
        return Starting(self, target, args)

    def _listen(self, host, port, ours, inbox):
        port = port or 1 + max(self.listeners, default=0)
        listener = SimpleNamespace(port=port, num_refused=0, close=lambda: self.listeners.pop(port, None))
        self.listeners[port] = (listener, ours, inbox)
        return listener

    def _greet(self, host, port, ours, inbox):
        if port not in self.listeners:
            raise ConnectionRefusedError("nobody listens there")
        listener, theirs, their_inbox = self.listeners[port]
        hello = decode(encode(Hello(ours.geometry, ours.address, ours.settings.instance)))
        answer = decode(encode(Welcome(theirs.geometry, theirs.settings.instance)))
        try:
            require_compatible(theirs.geometry, hello.geometry)
        except KVCacheError as error:
            listener.num_refused += 1
            raise type(error)(f"the peer refuses: {decode(encode(Refused(str(error)))).reason}") from None
        number = len(self.links) // 2
        near = Link(self, f"to prefill {number}", ours, answer, inbox)
        far = Link(self, f"to decode {number}", theirs, hello, their_inbox)
        near.other, far.other = far, near
        self.links += [near, far]
        far.start()
        return near


def _swap(coming):
    coming[0], coming[1] = coming[1], coming[0]
