"""Settings for the whole suite. Fixtures live beside the tests that use them."""

import os

from hypothesis import settings

# Times differ between machines, so tests never assert them; CI tries the same examples every time.
settings.register_profile("suite", deadline=None, print_blob=True)
settings.register_profile("ci", parent=settings.get_profile("suite"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "suite")
