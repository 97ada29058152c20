"""The v1 KV-cache manager for FastDeploy.

Importing the package loads nothing else: import the module that has what you need, such as `scheduler.cache_manager`.
"""

__version__ = "0.2.0.dev0"
