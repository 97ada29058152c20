"""A few requests through FastDeploy's real ResourceManagerV1, step by step."""

from tests.world.quiet import Quiet
from tests.world.real_host import RealHost
from tests.world.scenarios import make_worker


class Scene(Quiet):
    def __init__(self, manager):
        size, cache = manager.config.cache_config.block_size, manager.cache_manager
        super().__init__(size)
        self.manager, cache.reports = manager, self.reports
        sizes = {"blocks": cache.num_gpu_blocks, "host_blocks": cache.num_cpu_blocks, "block_size": size}
        self.host = RealHost(self, manager, make_worker(self, self.reports, **sizes))

    def add(self, *given):
        task = super().add(*given)
        self.host.loads.run()
        return task

    def run_dry(self):
        super().run_dry()
        self.host.pool.run()
        self.cache.check()
        self.host.check_idle()

    @property
    def num_finished(self):
        return self.clients.num_ended.get("finished", 0)
