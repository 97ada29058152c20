"""Stand-in for the SDK's names of memory."""

MEDIA_HBM = 1
