"""The prefill side: requests whose blocks a decode server reads, from admission to the end of the lease."""

from __future__ import annotations

from ....contract.messages import DeviceSlot
from ....transfer.ledger import LeaseLedger
from ....transfer.offer_desk import LeaseEnd
from ....transfer.rank_messages import OpenLease, TransferCommand, WithdrawLease
from .generation import Generation

__all__ = ["OfferedPrefills"]


class OfferedPrefills:
    """Leases by request id. Engine thread only.

    Slots may be reused once the lease is withdrawn, in the same batch or before. The decode server only reads them, and
    learns that its copy is invalid.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self.ledger = LeaseLedger(num_ranks=num_ranks)
        self._commands: list[TransferCommand] = []

    def __len__(self) -> int:
        """Open leases. Thread-safe."""
        return len(self.ledger)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.ledger

    def open(self, generation: Generation, block_table: list[DeviceSlot]) -> None:
        """Offer an admitted request that has slots for its whole prompt and is not computed."""
        peers = generation.request.offered_to
        assert peers, f"request {generation.request_id} is offered to no decode server"
        self.ledger.open(generation.request_id)
        num_tokens = len(generation.request.prompt_ids)
        name, slots = generation.request_id, tuple(block_table)
        self._commands.append(OpenLease(name, name, slots, num_tokens, peers))

    def withdraw(self, request_id: str, reason: str) -> None:
        """Withdraw the open lease, if any."""
        if self.ledger.withdraw(request_id):
            self._commands.append(WithdrawLease(request_id, reason))

    def reported(self, end: LeaseEnd, rank: int = 0) -> bool:
        """Take a rank's report. True: the lease is over. A failure on one rank ends it on all."""
        is_over = self.ledger.report(end, rank)
        if end.error is not None and not is_over:
            self.withdraw(end.request_id, end.error)
        return is_over

    def take_commands(self) -> list[TransferCommand]:
        """Commands for the next batch."""
        commands, self._commands = self._commands, []
        return commands

    def check_idle(self) -> None:
        self.ledger.check_idle()
