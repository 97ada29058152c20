"""A Hugging Face directory behind the server: it answers, or says in one line what is wrong with the directory."""

import httpx2
import pytest

from tests.e2e.server_process import started
from tests.lab.model.model_dirs import BASE, byte_level_tokenizer, random_tensors, write_model

pytestmark = pytest.mark.process


@pytest.fixture
def model(tmp_path):
    path = write_model(tmp_path / "little-llama", random_tensors(BASE), BASE)
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    return path


def test_model_directory_is_served_under_its_name(tmp_path, model):
    flags = ("--model", str(model), "--block-size", "8")
    with started(tmp_path / "server", *flags) as server, server.client() as client:
        assert "random" not in server.stdout
        assert [each.id for each in client.models.list()] == ["little-llama"]
        options = {"model": "little-llama", "prompt": "hello hello a hello", "max_tokens": 9, "temperature": 0}
        first = client.completions.create(**options)
        second = client.completions.create(**options)
        assert first.choices[0].text == second.choices[0].text
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        assert second.usage.prompt_tokens_details.cached_tokens == 8
        too_long = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "x " * 600})
        assert too_long.status_code == 400
        assert "too long for --max-model-len 512" in too_long.json()["error"]["message"]
