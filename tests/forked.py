"""Children that a test forks, because they use objects of its process.

A child never returns into the test runner, which would report its tests twice over one pipe, and never outlives its
test for long: after a fork it may wait for a lock whose thread stayed behind.
"""

import os
import signal
import traceback

LIMIT_S = 120


def start(use, *arguments, user=None):
    """Process id of a forked child that runs `use(*arguments)`, as `user` if this process may choose."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        if user is not None and os.geteuid() == 0:
            os.setuid(user)
        use(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ended_well(*children):
    """Whether children of `start` ended without an error, once all of them have ended."""
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return not any(statuses)
