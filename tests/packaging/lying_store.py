"""A contender for tests of the comparison of stores: this package's `file` store, and what it returns by `kind`."""

from our_files import OurFiles


class LyingStore(OurFiles):
    def __init__(self, directory, kind):
        super().__init__(directory, "bare")
        self.kind, self.num_gets = kind, 0

    def put(self, keys, held):
        super().put(keys[:-1] if self.kind == "forgets" else keys, held[: len(keys) - (self.kind == "forgets")])

    def get(self, keys, held):
        self.num_gets += 1
        if self.kind == "dies" and self.num_gets == 3:
            raise ValueError("at the third get")
        if self.kind == "swaps":
            held = held[::-1]
        found = super().get(keys, held)
        return found - 1 if self.kind == "misses" else found


CONTENDER = LyingStore
