"""FAKE requests, outputs and engine of FastDeploy, with what the roles use of them."""

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
    told = {"error_code": code, "error_msg": message, "outputs": SimpleNamespace(token_ids=[token])}
    return Output(request_id=of.request_id, ic_req_data=of.ic_req_data, **told)


class Output(SimpleNamespace):
    finished, error_code, error_msg = False, 200, None


class FrontEnd:
    """FastDeploy's LocalScheduler."""

    def __init__(self, *known):
        self.requests, self.results = dict.fromkeys(known), []
        self.has_request = self.requests.__contains__

    def put_results(self, outputs):
        self.results += outputs
        for each in outputs:
            if each.finished:
                self.requests.pop(each.request_id, None)


def engine(manager, *known):
    return SimpleNamespace(
        resource_manager=manager,
        scheduler=FrontEnd(*known),
        token_processor=SimpleNamespace(tokens_counter=dict.fromkeys(known, 1)),
    )
