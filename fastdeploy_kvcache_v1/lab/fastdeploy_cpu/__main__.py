"""`python -m fastdeploy_kvcache_v1.lab.fastdeploy_cpu FLAGS`: the process of `serve --fastdeploy-cpu`.

It starts the supervisor, whose standard input ends with this process in any case.
"""

import os
import signal
import subprocess
import sys

from . import SIGNALS


def main() -> int:
    held, tell = os.pipe()
    pipe = os.fdopen(tell, "wb")
    for number in SIGNALS:
        signal.signal(number, lambda *_: pipe.close())
    command = [sys.executable, "-m", f"{__package__}.supervisor", *sys.argv[1:]]
    status = subprocess.Popen(command, stdin=held, start_new_session=True).wait()  # a Ctrl-C reaches us alone
    return status if status >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
