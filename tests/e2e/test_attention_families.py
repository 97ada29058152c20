"""Real servers of other attention families: the same answer from the model, the device tier and the host tier."""

import httpx
import pytest

from tests.e2e.server_process import started

pytestmark = pytest.mark.process

SMALL = ("--block-size", "8", "--num-gpu-blocks-override", "40", "--max-model-len", "300", "--swap-space", "0.05")


TWO = ("--tensor-parallel-size", "2")


@pytest.mark.parametrize("flags", [("mla", "--mtp"), ("dsa", *TWO)], ids=" ".join)
def test_a_family_answers_alike_wherever_its_cache_is(tmp_path, flags):
    with started(tmp_path / "server", "--model-family", *flags, *SMALL, "--write-policy", "write_back") as server:

        def answer(prompt):
            options = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
            reply = httpx.post(f"{server.url}/v1/completions", json=options | {"ignore_eos": True}, timeout=60).json()
            return reply["choices"][0]["completion_token_ids"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]

        question = "what does a block of latent attention cost? " * 4
        cold, none = answer(question)
        warm, on_device = answer(question)
        for number in range(4):
            answer(f"{number} something else altogether " * 7)
        loaded, on_host = answer(question)
        assert cold == warm == loaded
        assert none == 0
        assert on_device >= 160
        metrics = server.metrics()
        assert metrics["host_hit_tokens_total"] + metrics["declined_load_tokens_total"] > 0
        assert on_host == metrics["host_hit_tokens_total"] or on_host < on_device
        if TWO[0] in flags:
            assert metrics["swap_bytes_total{direction=out,rank=0}"] > 0
            assert metrics["swap_bytes_total{direction=out,rank=1}"] == 0, "one host copy for both ranks"
            assert metrics["swap_bytes_total{direction=in,rank=1}"] == metrics["swap_bytes_total{direction=in,rank=0}"]
        assert (metrics["accepted_draft_tokens_total"] > 0) == ("--mtp" in flags)
        assert server.wait_idle()["ok"]
        assert server.stop() == 0, server.stderr
        server.assert_nothing_left()
