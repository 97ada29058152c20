"""The prefill side: requests whose blocks a decode server reads, from their admission to the end of the lease."""

from __future__ import annotations

from ....contract.messages import DeviceSlot
from ....transfer.ledger import LeaseLedger
from ....transfer.offer_desk import LeaseEnd
from ....transfer.rank_messages import OpenLease, TransferCommand, WithdrawLease
from .generation import Generation

__all__ = ["OfferedPrefills"]


class OfferedPrefills:
    """Engine thread only. A lease has the name of its request.

    Slots may be given away as soon as the lease is withdrawn, in the same batch or an earlier one: the decode server
    only reads them, and hears that what it read is not valid.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        """`num_ranks`: worker ranks of this server."""
        self.ledger = LeaseLedger(num_ranks=num_ranks)
        self._commands: list[TransferCommand] = []

    def __len__(self) -> int:
        """Open leases. Any thread may read it."""
        return len(self.ledger)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.ledger

    def open(self, generation: Generation, block_table: list[DeviceSlot]) -> None:
        """It is admitted with slots for its whole prompt, and has not been computed."""
        peers = generation.request.offered_to
        assert peers, f"request {generation.request_id} is offered to nobody"
        self.ledger.open(generation.request_id)
        num_tokens = len(generation.request.prompt_ids)
        name, slots = generation.request_id, tuple(block_table)
        self._commands.append(OpenLease(name, name, slots, num_tokens, peers))

    def withdraw(self, request_id: str, reason: str) -> None:
        """Does nothing without an open lease."""
        if self.ledger.withdraw(request_id):
            self._commands.append(WithdrawLease(request_id, reason))

    def reported(self, end: LeaseEnd, rank: int = 0) -> bool:
        """A worker rank's report; whether the lease is over. What ended badly on one is of no use on the others."""
        is_over = self.ledger.report(end, rank)
        if end.error is not None and not is_over:
            self.withdraw(end.request_id, end.error)
        return is_over

    def take_commands(self) -> list[TransferCommand]:
        """For the next batch."""
        commands, self._commands = self._commands, []
        return commands

    def check_idle(self) -> None:
        """Raises `InvariantError` unless every lease is over."""
        self.ledger.check_idle()
