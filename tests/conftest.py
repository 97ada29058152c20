"""Settings for the whole suite. Fixtures live beside the tests that use them."""

from hypothesis import settings

# Times differ between machines and tests never assert them; CI must fail on the same examples everywhere.
settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("suite")
