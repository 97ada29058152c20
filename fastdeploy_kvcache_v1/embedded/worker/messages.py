"""What crosses the socket between the engine process and the worker process. Plain picklable data.

Engine to worker: one `BatchMessage` per step, or `None` to stop. Worker to engine: `WorkerConnected`,
then `WorkerReady` or `WorkerFailed`, then one `StepResult` per batch, `TransferReport`s for copies that end between two
steps, and with a role `TransferNews` of leases and fetches that ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...batch_request import BatchRequest
from ...model.step import StepTask
from ...swap_message import SwapDecoder, SwapEncoder, SwapMessage
from ...transfer.rank_messages import TransferCommand


@dataclass(frozen=True)
class BatchMessage:
    """A `BatchRequest` on its way. Its copies travel in the message that both servers use for them."""

    requests: list[StepTask]
    swaps: list[SwapMessage]
    transfers: list[TransferCommand] = field(default_factory=list)

    @classmethod
    def pack(cls, batch: BatchRequest, encoder: SwapEncoder) -> BatchMessage:
        return cls(batch.requests, [encoder.encode(step) for step in batch.swap_steps], batch.transfers)

    def unpack(self, decoder: SwapDecoder) -> BatchRequest:
        """Raises as `SwapDecoder.decode`."""
        return BatchRequest(self.requests, [decoder.decode(message) for message in self.swaps], self.transfers)


@dataclass(frozen=True)
class WorkerConnected:
    """Both sockets are connected: their names are not needed any more."""


@dataclass(frozen=True)
class WorkerReady:
    """The model is loaded and both tiers are allocated."""

    pid: int
    ops: dict[str, str] = field(default_factory=dict)
    """Name of the implementation behind every copy op, as `ops.live()` says."""
    transfer_port: int | None = None
    """Where prefill servers reach it, for a decode server."""


@dataclass(frozen=True)
class WorkerFailed:
    """The worker cannot start and exits after this message."""

    message: str
    """One line."""
    is_user_error: bool
    """True for a wrong setting or model directory, False for a bug."""
