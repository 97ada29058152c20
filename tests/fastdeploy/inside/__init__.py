"""Tests that run inside a FastDeploy process, without a GPU, over its real classes: ../test_inside.py starts each file
in a process of its own, once per release. The file names lack `test_`, so that nothing else collects them.
"""

from fastdeploy_kvcache_v1 import plugin

plugin.activate()  # what the .pth file does, for a checkout that is not installed
