import pytest

from tests.embedded.served import running


@pytest.fixture
def server():
    with running() as started:
        yield started
