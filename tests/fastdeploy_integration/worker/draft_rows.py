"""A FAKE row, with speculative decoding or without, position by position, by the arithmetic of FastDeploy's kernels.

The main model verifies what was drafted and keeps some of it (`speculate_update`). The draft model then takes its
steps: it goes back over those that it took on a guess, or starts over behind what this pass verified where it had
stopped (`draft_model_preprocess`), computes the accepted tokens at once, and one more token per further step
(`draft_model_update`).
"""

from __future__ import annotations

import random


class DraftRow:
    def __init__(self, rng: random.Random, *, draft_tokens: int, model_steps: int, truncates: bool) -> None:
        """`truncates`: the draft model of a prompt has no position for the token behind it."""
        self.rng, self.truncates = rng, truncates
        self.draft_tokens, self.model_steps = draft_tokens, model_steps
        self.length = self.draft_length = self.proposed = 0
        """Lengths of the main model and of the draft model: tokens with KV."""
        self.is_paused = self.draft_stopped = False

    def chunk(self, start: int, end: int) -> set[int]:
        """Positions that the pass over `[start, end)` of the prompt writes, the last chunk or not."""
        self.length, self.draft_stopped = end, False
        if not self.draft_tokens:
            return set(range(start, end))
        written = set(range(start, end if self.truncates else end + 1))
        self.draft_length = end
        self.proposed = 1
        return written | self._further_steps()

    def decode(self) -> set[int]:
        """Positions that a pass writes."""
        if self.is_paused:
            self.draft_stopped = True
            return set()
        verified = 1 + min(self.proposed, self.draft_tokens)
        written = set(range(self.length, self.length + verified))
        accepted = self.rng.randint(1, verified)
        self.length += accepted
        if not self.draft_tokens:
            return written
        if self.draft_stopped:
            self.draft_stopped = False
            self.draft_length = self.length - verified
        else:
            self.draft_length -= self.model_steps - 1
        written |= set(range(self.draft_length, self.draft_length + accepted))
        self.draft_length += accepted
        self.proposed = 1
        return written | self._further_steps()

    def _further_steps(self) -> set[int]:
        """After each a draft model may see the end of the text: it stops, and starts over in a later pass."""
        written = set()
        for step in range(self.model_steps):
            if self.rng.random() < 0.1:
                self.draft_stopped = True
                break
            if step + 1 < self.model_steps:
                written.add(self.draft_length)
                self.draft_length += 1
                self.proposed += 1
        if self.model_steps < self.draft_tokens and self.rng.random() < 0.5:  # n-grams after the model's own
            self.proposed = self.rng.randint(self.proposed, self.draft_tokens)
        return written
