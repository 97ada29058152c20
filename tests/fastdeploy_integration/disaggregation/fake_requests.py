"""FAKE requests, outputs and engine of FastDeploy, with what the roles use of them."""

import threading
from types import SimpleNamespace

from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.transfer_name import KEY, give_name
from tests.fastdeploy_integration.engine.by_hand import FakeTask

BLOCK = 4
END = 2
"""The token that ends a sequence."""


def request(request_id="r", prompt=(5,) * 7, *, name=None, **fields):
    """With the name of a transfer: `name`, or a new one."""
    made = FakeTask(request_id, prompt)
    made.ic_req_data, made.error_code, made.eos_token_ids, made.idx = {KEY: name}, 200, [END], 0
    made.disaggregate_info = {"prefill_ip": "127.0.0.1", "prefill_connector_port": 1}
    vars(made).update(fields)
    made.get = lambda field, default=None: getattr(made, field, default)
    if name is None:
        give_name(made)
    return made


def first_token(of, token=7, *, code=200, message=None):
    """What a prefill server sends last for a request."""
    outputs = SimpleNamespace(token_ids=[token])
    return Output(of.request_id, error_code=code, error_msg=message, ic_req_data=of.ic_req_data, outputs=outputs)


class Output:
    def __init__(self, request_id, finished=False, error_code=200, error_msg=None, **others):
        self.request_id, self.finished, self.error_code, self.error_msg = request_id, finished, error_code, error_msg
        vars(self).update(others)


class Manager:
    """What of ResourceManagerV1 ends requests."""

    def __init__(self, cache):
        self.cache_manager = cache
        self.lock = threading.Lock()
        self.requests, self.waiting_abort_req_id_set, self.to_be_aborted_req_id_set = {}, set(), set()
        self.tasks_list = []

    def pre_recycle_resource(self, request_id):
        with self.lock:
            if request_id in self.requests:
                made = self.requests.pop(request_id)
                self.cache_manager.recycle_gpu_blocks(made.block_tables, request_id)
                made.block_tables = []


class FrontEnd:
    """FastDeploy's LocalScheduler."""

    def __init__(self, *known):
        self.known, self.results = set(known), []

    @property
    def requests(self):
        return dict.fromkeys(self.known)

    def has_request(self, request_id):
        return request_id in self.known

    def put_results(self, outputs):
        self.results += outputs
        self.known -= {each.request_id for each in outputs if each.finished}


def engine(cache, *known):
    return SimpleNamespace(
        resource_manager=Manager(cache),
        scheduler=FrontEnd(*known),
        token_processor=SimpleNamespace(tokens_counter=dict.fromkeys(known, 1)),
    )
