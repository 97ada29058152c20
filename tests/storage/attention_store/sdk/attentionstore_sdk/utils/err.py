"""Stand-in for the SDK's errors."""


class AttentionStoreSDKError(Exception):
    pass
