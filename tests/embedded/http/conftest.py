import pytest

from tests.embedded.http.served import running


@pytest.fixture
def server():
    with running() as started:
        yield started
