"""The `attention_store` store: a vendor's private SDK that names blocks by token ids and addresses device memory.

`tasks.py` is what engine and workers say to each other. In the engine, `tier.py` is a `StorageTier` whose loads
(`target.py`) and stores (`stores.py`) use the device tier; with `FD_AS_ONLY_FLUSH=1` no data moves, and the SDK's index
is kept true (`token_index.py`, `flushes.py`). In each worker rank, `agent.py` calls the SDK (`sdk.py`).
"""
