"""FastDeploy's real ResourceManagerV1 over our adapter, in scenes of a few requests."""

from concurrent.futures import Future

from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay
from tests.fastdeploy.real_manager import make_manager
from tests.fastdeploy.scene import Scene

LENGTH = 20


def make_scene(num_blocks, **options):
    return Scene(make_manager(num_blocks, 0, "write_through", **options))


def test_only_releases_with_sparse_attention_can_be_told_to_cut_no_prompt(monkeypatch):
    """What it needs: it has no cache, and no chunks."""
    monkeypatch.setenv("FD_DISABLE_CHUNKED_PREFILL", "1")
    scene, lengths = make_scene(80, caching=False), (40, 40, 24, 64, 1, 63)
    for number, length in enumerate(lengths):
        scene.add(f"r{number}", [number + 1] * length, 4)
    is_cut = False
    while scene.clients.requests:
        for task in (each for each in scene.step() if each.task_type.name == "PREFILL"):
            whole = 0, lengths[int(task.request_id[1:])]
            is_cut |= (task.prefill_start_index, task.prefill_end_index) != whole
    assert is_cut != any(row.qualname == "Indexer.forward" for row in overlay.active().table.rows)


def run_until_running(scene, request_id):
    while request_id not in [each.request_id for each in scene.manager.running]:
        scene.step()


def test_a_lost_batch_takes_no_request_whose_id_was_once_aborted():
    """A request ends while its abortion is on its way, its id comes again: 2.5 keeps that id."""
    scene = make_scene(40)
    manager = scene.manager
    first = scene.add("r", [1] * LENGTH, 60)
    run_until_running(scene, "r")
    manager.add_abort_req_ids("r")
    while "r" not in manager.to_be_aborted_req_id_set:
        manager.schedule()
    manager.cache_manager.transit.sent()  # the worker has it
    scene.manager.finish_requests(first.request_id)  # its last token was sent before
    scene.host.worker.drop_rows()
    scene.clients.ended(first.uid, "stopped")
    scene.add("r", [2] * LENGTH, 60)
    run_until_running(scene, "r")
    scene.add("s", [3] * LENGTH, 3)
    while not scene.host.count["lost before put"]:
        scene.step("lost before put")
    manager.cache_manager.transit.recover(manager)
    assert [each.request_id for each in manager.running] == ["r"]
    scene.run_dry()
    assert scene.num_finished == 2


def test_a_request_that_was_passed_over_when_schedule_raised_still_waits():
    """It is passed over because it is not complete yet."""
    scene, loaded = make_scene(60, caching=False), Future()
    manager = scene.manager
    manager.apply_async_preprocess = lambda request: request.async_process_futures.extend(
        [loaded] if request.request_id == "a" else []
    )
    for name in "abcd":
        scene.add(name, [ord(name)] * LENGTH, 3)
    while not scene.host.count["lost in schedule"]:
        scene.step("lost in schedule")
    assert "a" in [each.request_id for each in manager.waiting]
    loaded.set_result(None)
    scene.run_dry()
    assert scene.num_finished == 4
