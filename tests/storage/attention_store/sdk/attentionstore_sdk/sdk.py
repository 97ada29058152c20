"""Stand-in for the SDK's client: blocks by token ids, read from and written to raw addresses.

`faults.json` in the store's directory maps `match`, `read`, `write`, `flush` to what goes wrong in each call:

| key | what |
|---|---|
| `error` | the SDK's error with this text; `crash`: another exception |
| `times` | only so often |
| `delay_s` | it takes so long; `hang`: until the fault is gone |
| `short` | it does only so many blocks |
| `answer` | it answers this |
| `late_s` | with `error`: bytes go on arriving, or being read, in the background for so long |
"""

import ctypes
import hashlib
import json
import os
import threading
import time
from pathlib import Path

from .utils.err import AttentionStoreSDKError

__all__ = ["AttentionStoreSDK", "Tokens"]

LATE_BYTE = 0xEE


class Tokens:
    def __init__(self, token_ids, block_token_size):
        assert all(type(token) is int for token in token_ids)
        self.token_ids = list(token_ids)
        self.block_token_size = block_token_size

    @property
    def num_blocks(self):
        return len(self.token_ids) // self.block_token_size

    def name(self, index):
        """Of one block: all tokens up to its end."""
        tokens = self.token_ids[: (index + 1) * self.block_token_size]
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


MADE, OPTIONS = [], []
"""Arguments of every instance, and options of every read and write."""


class AttentionStoreSDK:
    def __init__(
        self,
        namespace="default_ns",
        pod_name="default_pod",
        model_version="v0",
        shard_id=0,
        shard_num=1,
        layer_num=1,
        block_token_size=64,
        bytes_per_shard_layer_per_block=1024,
        *more,
        attention_type=None,
        **options,
    ):
        if attention_type is not None:
            options["attention_type"] = attention_type
        first = (namespace, pod_name, model_version, shard_id, shard_num, layer_num, block_token_size)
        MADE.append((*first, bytes_per_shard_layer_per_block, *more, options))
        self._directory = Path(os.environ["STAND_IN_STORE"])
        self._pod = pod_name
        self._size = bytes_per_shard_layer_per_block
        self._blocks = self._directory / f"{namespace}.{model_version}.{shard_id}of{shard_num}"
        self._blocks.mkdir(parents=True, exist_ok=True)

    def match(self, tokens, start_block_idx, timeout):
        assert tokens.num_blocks, "no block is asked for"
        fault = self._fault("match")
        number = start_block_idx
        while number < tokens.num_blocks and (self._blocks / tokens.name(number)).exists():
            number += 1
        return fault.get("answer", number - start_block_idx)

    def read(self, layers, tokens, start_block_idx, keys, values, blocks, timeout, **options):
        OPTIONS.append(options)
        fault = self._fault("read", late=lambda until: self._scribble(keys, values, blocks, until))
        done = 0
        for index, block in enumerate(blocks[: fault.get("short", len(blocks))], start_block_idx):
            try:
                content = (self._blocks / tokens.name(index)).read_bytes()
            except FileNotFoundError:
                break
            for number, address in enumerate(self._addresses(keys, values, block)):
                ctypes.memmove(address, content[number * self._size : (number + 1) * self._size], self._size)
            done += 1
        return fault.get("answer", done)

    def write(self, layers, tokens, start_block_idx, keys, values, blocks, timeout, **options):
        OPTIONS.append(options)
        fault = self._fault("write")
        assert tokens.num_blocks >= start_block_idx + len(blocks)
        chosen = blocks[: fault.get("short", len(blocks))]
        for index, block in enumerate(chosen, start_block_idx):
            content = b"".join(
                ctypes.string_at(address, self._size) for address in self._addresses(keys, values, block)
            )
            path = self._blocks / tokens.name(index)
            temporary = self._directory / f"tmp-{os.getpid()}-{threading.get_ident()}"
            temporary.write_bytes(content)
            temporary.rename(path)
        return fault.get("answer", len(chosen))

    def flush_token_index(self, layers, tokens, start_block_idx, before, now):
        self._fault("flush")
        line = json.dumps([self._pod, tokens.token_ids, start_block_idx, before, now])
        with (self._directory / "index.jsonl").open("a") as file:
            file.write(line + "\n")

    def _addresses(self, keys, values, block):
        return [pointer + block * self._size for pointer in (*keys, *values)]

    def _fault(self, call, late=None):
        """What goes wrong now; waits and raises as it says."""
        fault = self._take(call)
        while fault.get("hang") and self._faults().get(call) == fault:
            time.sleep(0.01)
        time.sleep(fault.get("delay_s", 0))
        if late is not None and "late_s" in fault:
            until = time.monotonic() + fault["late_s"]
            threading.Thread(target=late, args=(until,), name="late-bytes", daemon=True).start()
        if "crash" in fault:
            raise RuntimeError(fault["crash"])
        if "error" in fault:
            raise AttentionStoreSDKError(fault["error"])
        return fault

    def _scribble(self, keys, values, blocks, until):
        while time.monotonic() < until:
            for block in blocks:
                for address in self._addresses(keys, values, block):
                    ctypes.memset(address, LATE_BYTE, self._size)
            time.sleep(0.001)

    def _faults(self):
        try:
            return json.loads((self._directory / "faults.json").read_text())
        except FileNotFoundError:
            return {}

    def _take(self, call):
        faults = self._faults()
        fault = faults.get(call, {})
        if "times" in fault:
            if not fault["times"]:
                return {}
            fault["times"] -= 1
            temporary = self._directory / f"faults-{os.getpid()}-{threading.get_ident()}"
            temporary.write_text(json.dumps(faults))
            temporary.rename(self._directory / "faults.json")
        return fault
