"""FastDeploy's own server on a machine without a GPU: `fastdeploy-kvcache serve --fastdeploy-cpu`.

The embedded engine's model computes behind FastDeploy's worker interface. Everything above it is FastDeploy itself: API
server, scheduler, queues, prefix cache. `supervisor` starts and watches it, `launch` is the start of each of its
processes, `hooks` lists what is changed in them, `worker`, `runner` and `batch_rows` are the worker.
"""
