"""Block hashes of requests whose prompts are named by the ids of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from ...contract.messages import BlockHash
from ...errors import ConfigError
from .trace import TraceRequest

INDEX_BYTES = 4


class TraceHasher:
    """Turns the ids of a trace into hashes of `block_size`-token blocks. Not thread-safe.

    An id names its tokens *and* all tokens before them. Ids of some traces (Qwen-Bailian's) name their tokens alone:
    digests are chained over the parent's, so equal tokens after another prefix are another block.

    One SHA-256 per id. Several blocks of an id share its digest and differ in an index. A block of several ids has the
    digest of the last one. Equal hashes mean an equal prefix, like with `block_hashing.BlockHasher`.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def prompt_hashes(self, request: TraceRequest) -> list[BlockHash]:
        """A hash per full block of the prompt, in order. Blocks without an id have unique names.

        Raises `ConfigError` unless the block size divides `tokens_per_id` or is a multiple of it.
        """
        return self._hashes(request, request.input_length)

    def output_hashes(self, request: TraceRequest) -> list[BlockHash]:
        """Hashes of the full blocks of generated tokens. Without names in the trace they are unique to the request, and
        later turns do not hit them.
        """
        first = request.input_length // self._block_size
        num_tokens = request.input_length + request.output_length
        if request.output_hash_ids:
            return self._hashes(request, num_tokens)[first:]
        return self._own_names(request, first, num_tokens // self._block_size)

    def _hashes(self, request: TraceRequest, num_tokens: int) -> list[BlockHash]:
        """Hashes of the first `num_tokens` tokens of prompt and named output."""
        per_id, size = request.tokens_per_id, self._block_size
        if size < 1 or (size % per_id and per_id % size):
            raise ConfigError(
                f"block size {size} must divide the {per_id} tokens of a hash id of the trace, or be a multiple of them"
            )
        num_full = request.num_full_ids
        # An id that prompt and output fill together has the name that later turns use.
        ids = request.hash_ids[:num_full] + (request.output_hash_ids or request.hash_ids[num_full:])
        digests = _chain(ids)
        if size <= per_id:
            indices = [index.to_bytes(INDEX_BYTES, "little") for index in range(per_id // size)]
            hashes = [BlockHash(digest[:-INDEX_BYTES] + index) for digest in digests for index in indices]
        else:  # a partial block has no hash
            per_block = size // per_id
            hashes = [BlockHash(digest) for digest in digests[per_block - 1 :: per_block]]
        num_blocks = num_tokens // size
        del hashes[num_blocks:]
        return hashes + self._own_names(request, len(hashes), num_blocks)

    def _own_names(self, request: TraceRequest, first: int, end: int) -> list[BlockHash]:
        stem = sha256(b"tokens without an id of trace line %d" % request.line).digest()[:-INDEX_BYTES]
        return [BlockHash(stem + index.to_bytes(INDEX_BYTES, "little")) for index in range(first, end)]


def _chain(ids: Sequence[int]) -> list[bytes]:
    """A digest per id, of it and all ids before it."""
    digests, digest = list[bytes](), bytes(32)
    for hash_id in ids:
        digest = sha256(digest + hash_id.to_bytes(max(8, -(-hash_id.bit_length() // 8)), "little")).digest()
        digests.append(digest)
    return digests
