import pytest

from tests.lab.server.served import running


@pytest.fixture
def server():
    with running() as started:
        yield started
