"""A stand-in with the interface of the vendor's private SDK, for tests. It is not the SDK, and shares no code with it.

What is stored lies in the directory `STAND_IN_STORE`, so that processes share it. `faults.json` in there says what goes
wrong from now on: see `sdk.py`.
"""
