"""A client of FastDeploy's servers hears that its request failed: what the API server's own classes answer, in every
form, to what an engine says of a request.
"""

import asyncio
import json
import os
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import pytest

os.environ["ZMQ_SEND_BATCH_DATA"] = "0"

from fastdeploy.engine.request import (
    CompletionOutput,
    ControlResponse,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ErrorResponse
from fastdeploy.entrypoints.openai.serving_chat import OpenAIServingChat
from fastdeploy.entrypoints.openai.serving_completion import OpenAIServingCompletion
from fastdeploy.entrypoints.openai.utils import DealerConnectionManager
from fastdeploy.input.text_processor import DataProcessor
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay
from fastdeploy_kvcache_v1.lab.model.directory import write_random_directory

PROMPT = list(range(40, 50))
END = 1


def says(request_id, *tokens, finished=False):
    now = time.time()
    metrics = RequestMetrics(arrival_time=now, inference_start_time=now, engine_recv_latest_token_time=now)
    metrics.request_start_time = metrics.first_token_time = now
    outputs = CompletionOutput(index=0, send_idx=0, token_ids=list(tokens), draft_token_ids=[])
    return RequestOutput(request_id=request_id, outputs=outputs, finished=finished, metrics=metrics).to_dict()


def fails(request_id, code, text):
    return RequestOutput(request_id=request_id, finished=True, error_code=code, error_msg=text).to_dict()


SCENES = {
    "well": lambda name: [[says(name, 70)], [says(name, 71)], [says(name, END, finished=True)]],
    "failed": lambda name: [[fails(name, 502, "its blocks did not arrive")]],
    "aborted": lambda name: [[fails(name, 499, "Aborted: its blocks did not arrive")]],
    "again": lambda name: [[fails(name, 502, "PD Error: its blocks did not arrive")]],
    "begun": lambda name: [[says(name, 70)], [fails(name, 502, "PD Error: its blocks did not arrive")]],
    "at-once": lambda name: [[says(name, 70), fails(name, 502, "PD Error: its blocks did not arrive")]],
}


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return DataProcessor(str(write_random_directory(tmp_path_factory.mktemp("answers") / "model")))


def engine_client(scene, processor=None):
    """Of an engine that answers at once, by a scene."""
    manager = DealerConnectionManager(os.getpid())

    def write(message):
        name = message[1].decode()
        for outputs in scene(name):
            manager.request_map[name.rsplit("_", 1)[0]].put_nowait(outputs)

    manager._get_least_loaded_connection = lambda: SimpleNamespace(write=write)

    async def format_and_add_data(task):
        task["max_tokens"] = 12
        return PROMPT

    return SimpleNamespace(
        is_master=True,
        semaphore=MagicMock(acquire=AsyncMock()),
        connection_manager=manager,
        data_processor=processor,
        format_and_add_data=format_and_add_data,
        check_model_weight_status=lambda: False,
        ori_vocab_size=300,
    )


async def answer(scene, form, processor):
    client, (kind, way) = engine_client(SCENES[scene], processor), form.split("/")
    streams = way == "stream"
    options = {"model": "m", "stream": streams, "return_token_ids": True}
    if kind == "chat":
        serving = OpenAIServingChat(client, None, 0, None, -1, None)
        body = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], **options)
        made = await serving.create_chat_completion(body)
    else:
        serving = OpenAIServingCompletion(client, None, 0, None, -1)
        made = await serving.create_completion(CompletionRequest(prompt=PROMPT, **options))
    shown = streamed([each async for each in made]) if streams else plain(made)
    assert client.semaphore.acquire.await_count == client.semaphore.release.call_count == 1
    assert not client.connection_manager.request_map
    return shown


def plain(made):
    if isinstance(made, ErrorResponse):
        return {"error": made.error.message, "tokens": []}
    choice = made.choices[0]
    tokens = getattr(choice, "message", choice).completion_token_ids
    return {"finish": choice.finish_reason, "tokens": list(tokens or ())}


def streamed(events):
    shown = {"tokens": []}
    for event in events:
        if (data := event.removeprefix("data: ").strip()) == "[DONE]":
            continue
        content = json.loads(data)
        if "error" in content:
            shown["error"] = content["error"]["message"]
        for choice in content.get("choices", ()):
            shown["tokens"] += choice.get("delta", choice).get("completion_token_ids") or ()
            shown["finish"] = choice.get("finish_reason") or shown.get("finish")
    return shown


FORMS = ("chat/plain", "chat/stream", "completion/plain", "completion/stream")
in_every_form = pytest.mark.parametrize("form", FORMS)


@in_every_form
@pytest.mark.parametrize("scene", ["failed", "aborted", "again"])
def test_request_that_fails_before_its_first_token_gets_its_error(scene, form, processor):
    shown = asyncio.run(answer(scene, form, processor))
    assert shown["tokens"] == []
    assert "its blocks did not arrive" in shown["error"]
    assert "NoneType" not in shown["error"]
    assert ("PD Error" in shown["error"]) == (scene == "again"), "the router of 2.6 tries these again"


@in_every_form
@pytest.mark.parametrize("scene", ["begun", "at-once"])
def test_one_that_fails_later_says_so_beside_the_tokens_that_it_has(scene, form, processor):
    shown = asyncio.run(answer(scene, form, processor))
    if overlay.active().table.capabilities.reschedules and form.endswith("plain"):
        assert shown == {"finish": "pd_reschedule", "tokens": [70]}, "the router goes on from there"
    else:
        assert "its blocks did not arrive" in shown["error"]


@in_every_form
def test_nothing_changes_for_one_that_is_well(form, processor):
    shown = asyncio.run(answer("well", form, processor))
    assert "error" not in shown
    assert shown["finish"] == "stop"
    assert shown["tokens"] in ([70, 71, END], [70, 71])


async def only_answer(name, output):
    """As the API server reads it from its connection, before any of its classes for completions."""
    manager = engine_client(lambda _: [[output.to_dict()]]).connection_manager
    dealer, queue = await manager.get_connection(name.rsplit("_", 1)[0])
    dealer.write([b"", name.encode()])
    return (await queue.get())[0]


def test_the_error_of_a_control_request_is_left_to_fastdeploy():
    told = asyncio.run(only_answer("control", ControlResponse("control", 500, "no")))
    assert told["error_message"] == "no"


@pytest.mark.parametrize("name", ["embd-1_0", "reward-1_0"])
def test_embeddings_and_rewards_are_answered(name):
    """As FastDeploy's token processor makes them: with its defaults."""
    output = PoolingRequestOutput(
        request_id=name,
        finished=True,
        metrics=RequestMetrics(arrival_time=time.time()),
        prompt_token_ids=PROMPT,
        outputs=PoolingOutput(data=[0.5]),
    )
    assert asyncio.run(only_answer(name, output))["outputs"]["data"] == [0.5]
