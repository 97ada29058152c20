"""Chunks fail while later ones are on their way: nobody else's tokens change, and no row speaks after its end.

The engine here is as FastDeploy's in what matters: it sends a batch before it hears of the pass of the one before,
shares whole blocks once they were sent, and gives rows and blocks away at once when a request ends.
"""

import random

import pytest

from fastdeploy_kvcache_v1.errors import ModelError
from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.batch_rows import FAILED, NO_TOKEN, RELEASED

from .host_tasks import ABORT, DECODE, PREEMPTED, other, prefill
from .test_failed_passes import LONG, fail_next_pass, tokens
from .test_runner import (
    BLOCK,
    PROMPT,
    decode_alone,
    expected,  # noqa: F401  # a fixture
    make_runner,  # noqa: F401  # a fixture
    model,  # noqa: F401  # a fixture
    run,
)

NUM_BLOCKS, NUM_ROWS, MAX_TOKENS, END = 16, 4, 6, 1


class Request:
    def __init__(self, name, prompt):
        self.name, self.prompt, self.outputs = name, prompt, []
        self.told = []
        """What the worker said of it, but for tokens."""
        self.leave()

    def leave(self):
        """Nothing of it is in the worker."""
        self.row, self.blocks, self.sent, self.is_preempted = None, [], 0, False
        self.to_compute = len(self.prompt) + len(self.outputs)

    @property
    def decodes(self):
        return self.sent == self.to_compute


class Engine:
    """Of a worker's `runner`. `fails(request, start)` says whether the pass of these tokens fails."""

    def __init__(self, runner, requests, seed, fails):
        self.runner, self.random, self.fails = runner, random.Random(seed), fails
        self.waiting, self.rows, self.ended = list(requests), [None] * NUM_ROWS, []
        self.users = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.free = list(range(NUM_BLOCKS))
        self.news = []
        self.silent = set()
        """Rows whose sequence ended in the worker, until it is given another one."""
        self._step, runner._steps.run = runner._steps.run, self._run

    # -- the engine's half

    def serve(self):
        for _ in range(4000):
            if not (self.waiting or any(self.rows)):
                return {each.name: each for each in self.ended}
            batch = self._schedule()
            heard, self.news = self.news, self._work(batch)
            for row, said in heard:
                self._hear(row, said)
        raise AssertionError("the engine makes no progress")

    def _schedule(self):
        running = [each for each in self.rows if each is not None and not each.is_preempted]
        if running and self.random.random() < 0.1:
            return [self._preempt(self.random.choice(running))]
        batch = [task for each in running for task in (self._decode(each) if each.decodes else self._chunk(each))]
        while self.waiting and None in self.rows and self._start(self.waiting[0]):
            batch += self._chunk(self.waiting.pop(0))
        return batch or [self._preempt(running[-1])] if running else batch

    def _preempt(self, request):
        self._free(request)
        request.is_preempted = True
        return other(PREEMPTED, request.row, request.name)

    def _decode(self, request):
        needed = -(-(len(request.prompt) + len(request.outputs) + 1) // BLOCK) - len(request.blocks)
        if needed <= 0 or not self._take(request, needed):
            return []
        return [other(DECODE, request.row, request.name, request.blocks)]

    def _start(self, request):
        """On a free row, with the whole blocks of the request that has the most of its prompt."""
        wanted, matched = request.prompt + request.outputs, []
        for each in filter(None, self.rows):
            theirs, count = each.prompt + each.outputs, 0
            while (end := (count + 1) * BLOCK) <= min(each.sent, len(wanted) - 1) and theirs[:end] == wanted[:end]:
                count += 1
            matched = max(matched, each.blocks[:count], key=len)
        if len(self.free) * BLOCK < len(wanted):
            return False
        for block in matched:
            self.users[block] += 1
        request.blocks, request.sent, request.row = list(matched), len(matched) * BLOCK, self.rows.index(None)
        self.rows[request.row] = request
        return True

    def _chunk(self, request):
        start = request.sent
        end = min(request.to_compute, start + self.random.choice([BLOCK, BLOCK + 3, 2 * BLOCK, 100]))
        if not self._take(request, -(-end // BLOCK) - len(request.blocks)):
            return []
        request.sent = end
        fields = {"start": start, "end": end, "outputs": request.outputs, "max_tokens": MAX_TOKENS}
        return [prefill(request.row, request.name, request.prompt, request.blocks, **fields)]

    def _take(self, request, count):
        if len(self.free) < count:
            return False
        for _ in range(count):
            request.blocks.append(self.free.pop())  # who had it last may not know yet
            self.users[request.blocks[-1]] = 1
        return True

    def _free(self, request):
        for block in request.blocks:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)
        request.blocks = []

    def _hear(self, row, said):
        request = self.rows[row]
        if said == NO_TOKEN or request is None:
            return
        if said == RELEASED:
            if request.is_preempted:
                self.rows[row] = None
                request.leave()
                self.waiting.append(request)
            return
        if said == FAILED:
            request.told.append(said)
        else:
            request.outputs.append(said)
        if said in (FAILED, END):
            self._free(request)
            self.rows[row] = None
            self.ended.append(request)

    # -- the worker's

    def _work(self, batch):
        if batch:
            self.runner.insert_tasks(batch)
            self.silent -= {task.idx for task in batch if hasattr(task, "prompt_token_ids")}
        before = len(self.runner.messages)
        self.runner.execute(NUM_ROWS)
        if len(self.runner.messages) == before:
            return []
        said = list(enumerate(self.runner.messages[-1][0]))
        assert not [row for row, token in said if row in self.silent and token not in (NO_TOKEN, RELEASED)], said
        self.silent |= {row for row, token in said if token in (FAILED, END)}
        return said

    def _run(self, batch):
        """A pass of which some requests fail: their blocks hold something, and not what they should."""
        result = self._step(batch)
        for task in batch.requests:
            if task.request_id in result.retry or not self.fails(task.request_id, task.start):
                continue
            end = task.start + len(task.token_ids)
            for cache in self.runner._steps._caches:
                for slot in task.block_table[task.start // BLOCK : -(-end // BLOCK)]:
                    cache[int(slot)] = 7.0
            result.tokens.pop(task.request_id, None)
            result.errors[task.request_id] = "it broke"
        return result


def requests(seed):
    """Some begin alike."""
    rng = random.Random(seed)
    families = [[rng.randrange(20, 200) for _ in range(40)] for _ in range(3)]
    made = []
    for number in range(30):
        own = [rng.randrange(20, 200) for _ in range(rng.randrange(1, 20))]
        made.append(Request(f"r{number}", rng.choice(families)[: rng.randrange(0, 40)] + own))
    return made


@pytest.mark.parametrize("seed", range(1, 5))
def test_whatever_chunk_fails_the_others_have_the_tokens_of_a_run_without_it(make_runner, seed):  # noqa: F811
    want = Engine(make_runner(), requests(seed), seed, lambda name, start: False).serve()
    rng = random.Random(seed)
    broken = set()

    def fails(name, start):
        failed = rng.random() < 0.1
        broken.update({name} if failed else ())
        return failed

    got = Engine(make_runner(), requests(seed), seed, fails).serve()
    assert got.keys() == want.keys()
    failed = {name for name, request in got.items() if request.told}
    assert failed <= broken
    assert 3 < len(failed) < 27, "else this shows nothing"
    for name, request in got.items():
        outputs = want[name].outputs
        assert request.outputs == outputs[: len(request.outputs)], name
        assert len(request.outputs) == len(outputs) or name in failed, name
        assert request.told in ([], [FAILED]), name


def test_a_request_ends_once_nothing_of_it_is_on_its_way(make_runner, expected):  # noqa: F811
    """FastDeploy sends the next chunk when this one has begun."""
    runner = make_runner()
    runner.insert_tasks([prefill(0, "a", LONG, range(2), end=16)])
    fail_next_pass(runner)
    assert run(runner, 1) == [NO_TOKEN]
    assert not runner.not_need_stop()
    runner.insert_tasks([prefill(0, "a", LONG, range(5), start=16)])
    assert run(runner, 1) == [FAILED]
    assert not runner.not_need_stop()
    runner.insert_tasks([prefill(0, "a", PROMPT, [0, 1, 7, 8], start=16)])  # comes again, and finds blocks of the first
    assert tokens(run(runner, 5)) == expected[:4]


def test_nobody_reads_a_chunk_that_was_not_computed(make_runner, model, expected):  # noqa: F811
    """Another request has repaired the chunk that failed when the next one comes, which stays undone."""
    runner = make_runner()
    runner.insert_tasks([prefill(0, "a", LONG, range(2), end=16)])
    fail_next_pass(runner)
    run(runner, 1)
    runner.insert_tasks([prefill(1, "b", PROMPT, [0, 1, 7, 8], start=16)])
    assert tokens(column(runner, 1, steps=3)) == expected[:2]
    runner.insert_tasks([prefill(0, "a", LONG, range(5), start=16), prefill(2, "c", LONG, [0, 1, 2, 9, 10], start=24)])
    assert runner._controller.failed_slots(range(16)) == [2, 3], "and no more: what b computed is read"
    assert tokens(column(runner, 2, steps=3)) == decode_alone(model, LONG, 2)


@pytest.mark.parametrize("kind", [PREEMPTED, ABORT])
def test_a_failed_request_that_is_taken_back_is_released_and_starts_anew(make_runner, expected, kind):  # noqa: F811
    runner = make_runner()
    runner.insert_tasks([prefill(0, "a", PROMPT, range(2), end=16)])
    fail_next_pass(runner)
    run(runner, 1)
    runner.insert_tasks([other(kind, 0, "a")])
    assert run(runner, 1) == [RELEASED]
    runner.insert_tasks([prefill(0, "a", PROMPT, range(2), end=16)])
    run(runner, 1)
    runner.insert_tasks([prefill(0, "a", PROMPT, range(4), start=16)])
    assert run(runner, 4) == expected[:4]


def test_a_pass_that_breaks_in_the_middle_of_a_prompt_stops_no_other_row(make_runner, expected):  # noqa: F811
    """All requests of the pass fail; the next ones are well."""
    runner = make_runner()
    runner.insert_tasks([prefill(0, "a", LONG, range(2), end=16), prefill(1, "b", LONG[1:], range(8, 13))])
    runner._decoder.forward, forward = _broken, runner._decoder.forward
    runner.execute(2)
    runner._decoder.forward = forward
    assert runner.messages[-1][0] == [NO_TOKEN, FAILED]
    runner.insert_tasks([prefill(1, "c", PROMPT, range(8, 12))])
    runner.execute(2)
    assert runner.messages[-1][0] == [NO_TOKEN, expected[0]]


def column(runner, row, steps):
    first = len(runner.messages)
    run(runner, steps, rows=3)
    return [message[0][row] for message in runner.messages[first:]]


def _broken(*arguments):
    raise ModelError("the pass broke")
