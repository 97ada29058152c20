"""A contender for tests of the comparison: this package's manager, and what it says of tables and copies by `kind`."""

from ours import Ours


class Liar(Ours):
    def __init__(self, device, host, block_size, kind):
        super().__init__(device, host, block_size, "lru")
        self.kind = kind

    def start(self, request):
        if self.kind == "dies" and request.id == "15":
            raise ValueError("at request 15")
        super().start(request)

    def table(self, request):
        table, matched = super().table(request)
        if self.kind == "early":
            matched = min(matched + 1, len(request.tokens) // self.block_size)
        if self.kind == "swapped" and matched > 1:
            table[:2] = table[1::-1]
        return table, matched

    def copies(self):
        for copies in super().copies():
            if self.kind == "crossed" and copies.is_out:
                copies = copies._replace(targets=list(copies.targets)[::-1])
            if self.kind != "unloaded" or copies.is_out:
                yield copies


CONTENDER = Liar
