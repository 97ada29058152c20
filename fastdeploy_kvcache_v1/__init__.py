"""The v1 KV-cache manager for FastDeploy.

Importing the package loads no module: import the one you need, for example `scheduler.cache_manager`.
"""

__version__ = "0.2.0.dev0"
