"""A few requests through FastDeploy's real ResourceManagerV1, step by step: nothing is late and nothing goes wrong but
what a test says. The ranks are those of tests/world, which notice whoever reads another block than its own.
"""

from types import SimpleNamespace

from tests.world.chooser import Chooser
from tests.world.clients import Clients, Request
from tests.world.clock import Clock
from tests.world.faults import Faults
from tests.world.memory import Tags
from tests.world.real_host import RealHost
from tests.world.reports import Reports
from tests.world.scenarios import make_worker


class Scene:
    def __init__(self, manager):
        world = SimpleNamespace(
            chooser=Chooser(0, ()), clock=Clock(), faults=Faults([]), tags=Tags(), log=lambda *words: None,
            root=lambda task: (0, task.cache_salt),
        )  # fmt: skip
        cache, reports = manager.cache_manager, Reports(world)
        cache.reports = reports
        size = manager.config.cache_config.block_size
        sizes = {"blocks": cache.num_gpu_blocks, "host_blocks": cache.num_cpu_blocks, "block_size": size}
        self.clients = world.clients = Clients(world, block_size=size)
        self.manager, self.cache = manager, cache
        self.host = RealHost(world, manager, make_worker(world, reports, [None], **sizes))
        self.requests = []

    def add(self, request_id, prompt, max_tokens, items=None):
        """Returns FastDeploy's request."""
        request = Request(len(self.requests), request_id, list(prompt), max_tokens)
        self.requests.append(request)
        self.clients.requests[request.uid] = request
        task = self.host.task(request, items)
        self.manager.add_request(task)
        self.host.loads.run()
        return task

    def step(self, lost=""):
        self.host.schedule_once(lost)
        self.host.take(None)
        self.host.run(None)
        device = self.host.worker.ranks[0].device
        device.run_until(lambda: device.is_idle)
        self.host.take_tokens(None)
        self.cache.check()

    def run_dry(self):
        for _ in range(5000):
            if not self.clients.requests:
                break
            self.step()
        assert not self.clients.requests, "no progress"
        self.host.pool.run()
        self.cache.check()
        self.host.check_idle()

    @property
    def num_finished(self):
        return self.clients.num_ended.get("finished", 0)
