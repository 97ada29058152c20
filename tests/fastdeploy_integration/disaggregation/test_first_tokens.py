"""First tokens of a decode server wait for their blocks; what cannot run is answered, and leaves nothing."""

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.first_tokens import REFUSAL_S, FirstTokens
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.grants import ABORTED, FAILED
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.rank_channel import RankNews
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.transfer_name import name_of
from fastdeploy_kvcache_v1.transfer.fetch import FetchResult
from fastdeploy_kvcache_v1.transfer.rank_messages import TransferNews

from .decode_caches import decode_cache
from .fake_requests import BLOCK, END, Output, engine, first_token, request

DROP = "decode_drop", ["r"]


class Server:
    """A decode engine, its adapter and the queue of what prefill servers send."""

    def __init__(self, *known):
        self.news, self.queue, self.now, self.num_ended = [], [], 0.0, 0
        self.cache = decode_cache(clock=lambda: self.now)
        self.cache._rank_news = self._take_news
        self.sent = self.cache.sent
        self.engine = engine(self.cache, *known)
        self.tokens = FirstTokens(self.engine, self.cache, Output, self._count_end, clock=lambda: self.now)

    def _count_end(self):
        self.num_ended += 1

    def _take_news(self):
        news, self.news = self.news, []
        return news

    def preallocate(self, request_id="r", count=2):
        made = request(request_id)
        made.block_tables = self.cache.allocate_gpu_blocks(count + 1, request_id)
        made.need_prefill_tokens = count * BLOCK - 1
        self.engine.resource_manager.requests[request_id] = made
        self.cache.grant(made)
        return made

    def report(self, made, error=None):
        self.news.append(RankNews(0, TransferNews(fetches=(FetchResult(name_of(made), 1, 1.0, (), error),))))

    def loop(self, *outputs, items=()):
        """One round of FastDeploy's thread, which finds `outputs` and other items. Returns the ids whose first token it
        gets, and other items.
        """
        self.queue += [*([("decode", list(outputs))] if outputs else ()), *items]
        if self.tokens.is_empty(lambda: not self.queue):
            return []
        queue, self.queue = self.queue, []
        items = self.tokens.take(lambda: queue)
        self.cache.check()
        return [each if each[0] != "decode" else [one.request_id for one in each[1]] for each in items]

    @property
    def answers(self):
        return [(each.request_id, each.error_code, each.finished) for each in self.engine.scheduler.results]

    def check_empty(self):
        self.cache.grants.check_idle()
        assert len(self.cache.gpu_free_block_list) == 20
        assert self.engine.resource_manager.requests == {}


def test_a_first_token_waits_for_its_blocks_and_others_pass_it():
    server = Server("slow", "fast")
    slow, fast = server.preallocate("slow"), server.preallocate("fast")
    others = [("decode", [request("new")]), DROP]
    server.report(fast)
    assert server.loop(first_token(slow), first_token(fast), items=others) == [["new"], DROP, ["fast"]]
    assert server.loop() == []
    assert server.tokens.is_empty(lambda: True) is True
    assert server.tokens.is_empty(lambda: False) is False
    server.report(slow)
    assert server.loop() == [["slow"]]
    assert server.answers == []


def test_a_request_whose_client_has_not_come_yet_waits_for_it_and_not_for_ever():
    server = Server()
    made = server.preallocate()
    server.report(made)
    assert server.loop(first_token(made)) == []
    server.engine.scheduler.known.add("r")
    assert server.loop() == [["r"]]
    other = server.preallocate("other")
    server.report(other)
    assert server.loop(first_token(other)) == []
    server.now = 20.0
    assert server.loop() == []
    assert server.answers == [("other", FAILED, True)]


@pytest.mark.parametrize("cause", ["fetch failed", "prefill failed", "abort"])
def test_a_request_that_cannot_run_is_answered_and_leaves_nothing(cause):
    server = Server("r")
    made = server.preallocate()
    manager = server.engine.resource_manager
    if cause == "fetch failed":
        server.report(made, "the peer died")
    elif cause == "prefill failed":
        server.loop(first_token(made, code=501, message="no"))
    else:
        manager.waiting_abort_req_id_set |= {"r", "of a request that is not here"}
    server.loop()
    server.loop()
    code = {"fetch failed": FAILED, "prefill failed": 501, "abort": ABORTED}[cause]
    assert server.answers == [("r", code, True)]
    assert server.num_ended == 1
    assert server.engine.token_processor.tokens_counter == {}
    assert manager.waiting_abort_req_id_set == set()
    if cause != "fetch failed":  # its rank has not said yet that it is over
        assert len(server.cache.gpu_free_block_list) == 17
        server.report(made, "cancelled")
        server.loop()
    server.check_empty()
    assert server.loop(first_token(made)) == []
    assert len(server.answers) == 1


def test_a_request_that_is_complete_with_its_first_token_does_not_run():
    server = Server("r")
    made = server.preallocate()
    server.report(made)
    assert server.loop(first_token(made, END)) == []
    assert server.answers == [("r", 200, True)]
    server.check_empty()


def test_a_refusal_reaches_the_client_of_a_request_that_never_got_blocks():
    server = Server("r", "running")
    server.engine.resource_manager.requests["running"] = request("running")
    asked = [request(name) for name in ("r", "running", "unknown")]
    assert server.loop(*(first_token(each, code=502, message="full") for each in asked)) == []
    assert server.answers == [("r", 502, True)]


@pytest.mark.parametrize("told", ["refusal", "drop"])
def test_a_refusal_waits_for_the_request_which_the_router_sends_to_both(told):
    server = Server()
    if told == "refusal":
        server.loop(first_token(request("r"), code=499, message="paused"))
    else:
        server.loop(items=[DROP])
    assert server.answers == []
    server.now = REFUSAL_S - 1
    server.engine.scheduler.known.add("r")
    server.loop()
    assert server.answers == [("r", ABORTED, True)]
    server.engine.scheduler.known.add("r")  # another one
    server.loop()
    assert len(server.answers) == 1
    assert server.num_ended == 0, "FastDeploy has counted no blocks of it"


def test_a_refusal_of_a_request_that_does_not_come_is_forgotten():
    server = Server()
    server.loop(items=[DROP])
    server.now = REFUSAL_S
    server.loop()
    server.engine.scheduler.known.add("r")
    server.loop()
    assert server.answers == []


def test_fastdeploy_alone_answers_a_dropped_request_that_is_here():
    server = Server("r")
    assert server.loop(items=[DROP]) == [DROP]
    server.loop()
    assert server.answers == []


def test_a_late_error_of_a_request_does_not_end_the_next_one_of_its_id():
    """The router of 2.6 sends a request that failed again, with its id."""
    server = Server("r")
    made = server.preallocate()
    server.report(made, "the link broke")
    server.loop()
    assert server.answers == [("r", FAILED, True)]
    server.engine.scheduler.known.add("r")
    server.loop(first_token(made, code=501, message="prefill failed"))
    server.loop()
    assert len(server.answers) == 1
