"""Settings for the whole suite. Fixtures live beside the tests that use them."""

import os

from hypothesis import settings

from fastdeploy_kvcache_v1.model import configure_reproducible_math

# Times differ between machines, so tests never assert them; CI tries the same examples every time.
settings.register_profile("suite", deadline=None, print_blob=True)
settings.register_profile("ci", parent=settings.get_profile("suite"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "suite")

# The math library must be set up before any test module imports paddle.
configure_reproducible_math()
