"""Stand-in for what the SDK wants to know of a model on a GPU."""

import enum


class AttentionType(enum.Enum):
    MHA = 1
