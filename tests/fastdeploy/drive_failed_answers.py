"""Run inside a FastDeploy process: what its API server's own classes answer to what an engine says of a request."""

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

os.environ["ZMQ_SEND_BATCH_DATA"] = "0"

from fastdeploy_kvcache_v1 import plugin

plugin.activate()

from fastdeploy.engine.request import (  # noqa: E402
    CompletionOutput,
    ControlResponse,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from fastdeploy.entrypoints.openai.protocol import (  # noqa: E402
    ChatCompletionRequest,
    CompletionRequest,
    ErrorResponse,
)
from fastdeploy.entrypoints.openai.serving_chat import OpenAIServingChat  # noqa: E402
from fastdeploy.entrypoints.openai.serving_completion import OpenAIServingCompletion  # noqa: E402
from fastdeploy.entrypoints.openai.utils import DealerConnectionManager  # noqa: E402
from fastdeploy.input.text_processor import DataProcessor  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.random_model import write_random_model  # noqa: E402

MODEL = write_random_model(Path(tempfile.mkdtemp()) / "model")
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


class Dealer:
    """The engine: answers what it is asked."""

    def __init__(self, manager, scene):
        self.manager, self.scene = manager, scene

    def write(self, message):
        name = message[1].decode()
        for outputs in self.scene(name):
            self.manager.request_map[name.rsplit("_", 1)[0]].put_nowait(outputs)


class Semaphore:
    free = 1

    async def acquire(self):
        self.free -= 1

    def release(self):
        self.free += 1

    def status(self):
        return self.free


def engine_client(scene):
    manager = DealerConnectionManager(os.getpid())
    manager._get_least_loaded_connection = lambda: Dealer(manager, scene)

    async def format_and_add_data(task):
        task["max_tokens"] = 12
        return PROMPT

    return SimpleNamespace(
        is_master=True,
        semaphore=Semaphore(),
        connection_manager=manager,
        data_processor=DataProcessor(str(MODEL)),
        format_and_add_data=format_and_add_data,
        check_model_weight_status=lambda: False,
        ori_vocab_size=300,
    )


async def answer(kind, scene, *, streams):
    client = engine_client(scene)
    options = {"model": "m", "stream": streams, "return_token_ids": True}
    if kind == "chat":
        serving = OpenAIServingChat(client, None, 0, None, -1, None)
        body = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], **options)
        made = await serving.create_chat_completion(body)
    else:
        serving = OpenAIServingCompletion(client, None, 0, None, -1)
        made = await serving.create_completion(CompletionRequest(prompt=PROMPT, **options))
    shown = streamed([each async for each in made]) if streams else plain(made)
    assert client.semaphore.free == 1, "it is given back"
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


async def control():
    """The answer to a control request comes the same way, and FastDeploy looks at its error itself."""
    manager = engine_client(lambda name: [[ControlResponse(name, 500, "no").to_dict()]]).connection_manager
    dealer, queue = await manager.get_connection("control")
    dealer.write([b"", b"control"])
    return (await queue.get())[0]["error_message"]


async def pooled(name):
    """An embedding or a reward, as FastDeploy's token processor makes it: with its defaults."""
    output = PoolingRequestOutput(
        request_id=f"{name}_0",
        finished=True,
        metrics=RequestMetrics(arrival_time=time.time()),
        prompt_token_ids=PROMPT,
        outputs=PoolingOutput(data=[0.5]),
    )
    manager = engine_client(lambda _: [[output.to_dict()]]).connection_manager
    dealer, queue = await manager.get_connection(name)
    dealer.write([b"", f"{name}_0".encode()])
    return (await queue.get())[0]["outputs"]["data"]


async def main():
    for name, scene in SCENES.items():
        for kind in ("chat", "completion"):
            for streams in (False, True):
                shown = await answer(kind, scene, streams=streams)
                print("ANSWER", f"{name}/{kind}/{'stream' if streams else 'plain'}", json.dumps(shown))
    print("CONTROL", await control())
    for name in ("embd-1", "reward-1"):
        print("POOLED", name, await pooled(name))


asyncio.run(main())
sys.stdout.flush()
os._exit(0)
