"""On the PYTHONPATH of a server: its worker stands still instead of a further step, after as many as the file says that
`KVCACHE_TEST_STEPS` names, until that file is gone.
"""

import os
import time
from pathlib import Path

import wrapt


def hold(token_channel):
    file = Path(os.environ["KVCACHE_TEST_STEPS"])
    num_steps = 0

    @wrapt.patch_function_wrapper(token_channel, "TokenSender.send")
    def send(wrapped, instance, args, kwargs):
        nonlocal num_steps
        num_steps = num_steps + 1 if file.exists() else 0
        while file.exists() and num_steps > int(file.read_text()):
            time.sleep(0.01)
        wrapped(*args, **kwargs)


wrapt.register_post_import_hook(hold, "fastdeploy_kvcache_v1.lab.fastdeploy_cpu.token_channel")
