"""In front of a server's own modules: its worker says that it may not copy by C."""

import wrapt


def refuse(copies):
    from fastdeploy_kvcache_v1.contract.messages import CopyPath

    copies.cpu_paths = lambda: (*copies.both_ways("numpy"), CopyPath("out", "c", "undefined symbol: copy_rows"))


wrapt.register_post_import_hook(refuse, "fastdeploy_kvcache_v1.worker.ops.copies")
