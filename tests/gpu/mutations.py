"""Forgotten and misplaced waits: each a text of one module and what takes its place. All must be noticed."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """Each text of `changes` stands once in `module`, a name below the package, and becomes the one beside it."""

    name: str
    module: str
    changes: tuple[tuple[str, str], ...]


PATCHES = "fastdeploy_integration.worker.patches"
WORKER_CACHE = "fastdeploy_integration.worker.worker_cache"
TABLES = "fastdeploy_integration.worker.running_tables"
CONTROLLER, TRANSFERS, HAZARDS = "worker.cache_controller", "worker.transfer_manager", "worker.hazards"
WAITS, COUNTER, CUDA = "worker.layer_waits", "worker.layer_done_counter", "worker.runtime.cuda"
RECORD = "worker.transfer_record"
ROWS = "worker.ops.rows"

_CONFLICTS = "for dependency in self.conflicts(actor, reads, writes):\n"


_ON_HOST = "self.name == 'host' and dependency.hazard is "


def _mutation(name: str, module: str, *texts: str) -> Mutation:
    """`texts`: was, now, was, now."""
    return Mutation(name, module, tuple(zip(texts[::2], texts[1::2], strict=True)))


def _forgets(name: str, condition: str) -> Mutation:
    """A conflict that no stream waits for."""
    return _mutation(name, HAZARDS, _CONFLICTS, f"{_CONFLICTS}            if {condition}:\n                continue\n")


def _between(earlier: str, later: str) -> str:
    return f"dependency.earlier is Actor.{earlier} and dependency.later is Actor.{later}"


MUTATIONS = [
    # ---- the pass and its event
    _mutation(
        "no event after compute",
        WORKER_CACHE,
        "event = self._controller.after_compute(reads, writes)",
        "event = self._runtime.compute_stream.record_event()",
    ),
    _mutation(
        "the event before the pass",
        PATCHES,
        "    result = wrapped(*args, **kwargs)\n    worker_cache().end_forward()\n",
        "    worker_cache().end_forward()\n    result = wrapped(*args, **kwargs)\n",
    ),
    _mutation(
        "a pass that began does not count",
        WORKER_CACHE,
        "        self._running = reads, writes\n",
        "",
    ),
    # ---- layers
    _mutation(
        "attention waits after it read",
        PATCHES,
        "            counter.wait_for_layer(self.layer_id)\n"
        "        return original(self, q, k, v, qkv, compressed_kv, k_pe, forward_meta)",
        "            original(self, q, k, v, qkv, compressed_kv, k_pe, forward_meta)\n"
        "            return counter.wait_for_layer(self.layer_id)\n"
        "        return original(self, q, k, v, qkv, compressed_kv, k_pe, forward_meta)",
    ),
    _mutation(
        "attention does not wait",
        PATCHES,
        "            counter.wait_for_layer(self.layer_id)\n        return original(self, q,",
        "            pass\n        return original(self, q,",
    ),
    _mutation(
        "draft layers count from the main model's first",
        WORKER_CACHE,
        "self._counter.wait_for_layer(self._first_layer + layer)",
        "self._counter.wait_for_layer(layer)",
    ),
    _mutation(
        "the draft model does not wait",
        PATCHES,
        "        setattr(instance.forward_meta, COUNTER, OffsetCounter(counter, cache.num_main_layers))",
        "        pass",
    ),
    _mutation(
        "a draft graph does not wait",
        PATCHES,
        "    if instance.forward_meta.step_use_cudagraph:\n        counter.wait_all()",
        "    if instance.forward_meta.step_use_cudagraph:\n        pass",
    ),
    _mutation(
        "graphs wait as if their layers ran",
        PATCHES,
        "plain = not meta.step_use_cudagraph and graphs.graph_opt_level == 0",
        "plain = graphs.graph_opt_level == 0",
    ),
    _mutation(
        "a layer waits for the one before",
        COUNTER,
        "self._compute.wait_event(self._events[layer],",
        "self._compute.wait_event(self._events[max(0, layer - 1)],",
    ),
    _mutation(
        "waiting for all layers waits for the first",
        COUNTER,
        "self.wait_for_layer(len(self._events) - 1, timeout)",
        "self.wait_for_layer(0, timeout)",
    ),
    _mutation(
        "swap-ins of skipped passes are not waited for",
        WORKER_CACHE,
        "            if counter is not layered:\n                counter.wait_all()",
        "            if counter is not layered:\n                pass",
    ),
    _mutation(
        "a swap-in of an earlier step counts as the latest",
        WORKER_CACHE,
        "layered = self._latest if layer_by_layer else None",
        "layered = self._counters[-1] if self._counters and layer_by_layer else None",
    ),
    # ---- what a pass writes
    _mutation(
        "a pass waits for no copy",
        WORKER_CACHE,
        "before_compute((), late, counter=layered",
        "before_compute((), SlotSet(), counter=layered",
    ),
    _mutation(
        "the last block is not named",
        TABLES,
        "np.minimum(-(-stop // self._block_size), num_blocks)",
        "np.minimum(-(-stop // self._block_size) - 1, num_blocks)",
    ),
    _mutation(
        "a row that decodes is named where its chunk ended",
        TABLES,
        "        self._numbers[_STOP] += self._numbers[_PER_PASS]\n",
        "",
    ),
    _mutation(
        "rows that grow are not named",
        TABLES,
        "        self._numbers[_BLOCKS, index] = len(table)\n",
        "        self._numbers[_BLOCKS, index] = self._numbers[_BLOCKS, index] or len(table)\n",
    ),
    _mutation(
        "a chunk is over before its pass",
        TABLES,
        "max(0, start - self._reach_back), end - 1 + self._reach, 0",
        "max(0, end - self._reach_back), end + self._reach, self._tokens_per_pass",
    ),
    _mutation(
        "draft tokens are not named",
        TABLES,
        "self._reach = 2 * draft_tokens + 3 if draft_tokens else 1",
        "self._reach = 1",
    ),
    _mutation(
        "accepted draft tokens do not count",
        TABLES,
        "self._tokens_per_pass = 1 + draft_tokens",
        "self._tokens_per_pass = 1",
        "2 * draft_tokens + 3 if draft_tokens",
        "draft_tokens + 1 if draft_tokens",
    ),
    _mutation(
        "the engine is believed more than it knows",
        TABLES,
        "np.minimum(heard - 1, highest)",
        "highest",
    ),
    _mutation(
        "new blocks of a row are not taken over",
        TABLES,
        "self._tables[index, known : len(table)] = table[known:]",
        "self._tables[index, :known] = table[:known]",
    ),
    _mutation(
        "rows are taken for those before them",
        TABLES,
        "np.repeat(rows, counts)",
        "np.repeat(np.arange(len(rows)), counts)",
    ),
    _mutation(
        "a plan names the first slot of each run",
        ROWS,
        "return CopyRuns(table, (source, target))",
        "return CopyRuns(table, (source[starts], target[starts]))",
    ),
    # ---- conflicts between streams
    _forgets("readers do not hold up writers", "dependency.hazard is Hazard.WRITE_AFTER_READ"),
    _forgets("writers do not hold up readers", "dependency.hazard is Hazard.READ_AFTER_WRITE"),
    _forgets("writers do not hold up writers", "dependency.hazard is Hazard.WRITE_AFTER_WRITE"),
    _forgets("a D2H does not wait for compute", _between("COMPUTE", "OUTPUT")),
    _forgets("an H2D does not wait for compute", _between("COMPUTE", "INPUT")),
    _forgets("an H2D does not wait for a D2H", _between("OUTPUT", "INPUT")),
    _forgets("a D2H does not wait for an H2D", _between("INPUT", "OUTPUT")),
    _forgets("compute does not wait for a D2H", _between("OUTPUT", "COMPUTE")),
    _forgets(
        "host slots are written over while they are read", "self.name == 'host' and dependency.hazard.value == 'WAR'"
    ),
    _forgets("host slots are read before they are written", "self.name == 'host' and dependency.hazard.value == 'RAW'"),
    _mutation(
        "a write is forgotten with the reads that it waited for",
        HAZARDS,
        "        self._uses.append(_Use(actor, event, read, written))",
        "        self._uses.append(_Use(actor, event, read, 0))",
    ),
    _mutation(
        "a reader is forgotten for the next one of another actor",
        HAZARDS,
        "if use.actor is actor and actor.is_fifo and use.reads & read:",
        "if use.reads & read:",
    ),
    _mutation(
        "a write makes what was read beside it forgotten",
        HAZARDS,
        "            self.reads = without(self.reads, slots)",
        "            self.reads = 0",
    ),
    _mutation(
        "a failed copy fails nobody who reads it",
        HAZARDS,
        "return self.hazard is Hazard.READ_AFTER_WRITE",
        "return False",
    ),
    # ---- copies and their events
    _mutation(
        "a layer's event before its copy",
        TRANSFERS,
        "            stream.enqueue(ops.swap_cache_per_layer, targets, sources, runs)\n"
        "            layer_events.append(stream.record_event())\n",
        "            layer_events.append(stream.record_event())\n"
        "            stream.enqueue(ops.swap_cache_per_layer, targets, sources, runs)\n",
    ),
    _mutation(
        "a copy's last event before the copy",
        TRANSFERS,
        "            stream.enqueue(ops.swap_cache_all_layers, to, of, runs)\n        else:",
        "            pass\n        else:",
        "        transfer = self._track(actor, step, metadata, slots, started, stream.record_event(timed=True))\n"
        "        transfer.layer_events",
        "        transfer = self._track(actor, step, metadata, slots, started, stream.record_event(timed=True))\n"
        "        if sources.isdisjoint(overwritten):\n"
        "            stream.enqueue(ops.swap_cache_all_layers, to, of, runs)\n"
        "        transfer.layer_events",
    ),
    _mutation(
        "a layer of an eviction counts before its copy",
        TRANSFERS,
        "                stream.enqueue(ops.swap_cache_per_layer, layer_to, layer_of, runs)\n"
        "                layer_events.append(stream.record_event())\n",
        "                layer_events.append(stream.record_event())\n"
        "                stream.enqueue(ops.swap_cache_per_layer, layer_to, layer_of, runs)\n",
    ),
    _mutation(
        "a layer waits for another layer's eviction",
        WAITS,
        "self._compute.wait_event(layer_events[layer],",
        "self._compute.wait_event(layer_events[0],",
    ),
    _mutation(
        "a swap-in waits for the first layer of an eviction only",
        TRANSFERS,
        "                stream.wait_event(eviction[layer])",
        "                stream.wait_event(eviction[0])",
    ),
    _mutation(
        "a pass reads nothing",
        WORKER_CACHE,
        "self._controller.after_compute(reads, writes)",
        "self._controller.after_compute(SlotSet(), writes)",
    ),
    _mutation(
        "swap-ins before evictions",
        CONTROLLER,
        "for metadata, runs in planned:\n            counter",
        "for metadata, runs in reversed(planned):\n            counter",
    ),
    _mutation(
        "copies are reported before they ended",
        RECORD,
        "        if self.given_up is None and not self.finished.done():\n            return None\n",
        "",
    ),
    _mutation(
        "tensors go while copies run",
        CONTROLLER,
        "            self._finish_copies()\n            self._transfer_manager.close()\n",
        "",
    ),
    _mutation(
        "the fill of new tensors is no use of them",
        TRANSFERS,
        "self._filled = self.after_compute((), None)",
        "self._filled = self._runtime.compute_stream.record_event()",
    ),
    # ---- CUDA
    _mutation("events are recorded on the null stream", CUDA, "event.record(self._stream)", "event.record()"),
    _mutation(
        "copies go to another stream",
        CUDA,
        "stream=self.handle))",
        "stream=vars(self).setdefault('_other', self._cupy.cuda.Stream(non_blocking=True)).ptr))",
    ),
    _mutation(
        "copy streams do not wait",
        CUDA,
        "            self._stream.wait_event(event.raw)\n        error =",
        "            pass\n        error =",
    ),
    _mutation(
        "compute does not wait",
        CUDA,
        "from error\n        if isinstance(event, CudaEvent):\n            self._stream.wait_event(event.raw)",
        "from error",
    ),
    _mutation(
        "host memory is not page-locked",
        CUDA,
        "            self._cupy.cuda.runtime.hostRegister(buffer.address, nbytes, _PORTABLE | _MAPPED)",
        "            pass",
        "        self._cupy.cuda.runtime.hostUnregister(buffer.address)",
        "        pass",
    ),
    _mutation(
        "an event is done when it was asked once",
        CUDA,
        "            self._done = status != _NOT_READY",
        "            self._done = True",
    ),
]
