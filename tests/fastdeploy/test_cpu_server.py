"""What is said of a server that has ended."""

from .cpu_server import named_by


def test_a_server_is_blamed_for_names_with_its_own_ports_alone(tmp_path):
    own = ["fd_task_queue_4567.sock", "fmq_ctrl_w2e_rank0_4567.ipc", "launched_cache_manager_signal.8901"]
    others = ["psm_1a2b", "sem.45678", "x.14567", "router_890.ipc"]
    for name in own + others:
        (tmp_path / name).touch()
    assert {path.name for path in named_by((4567, 8901), [tmp_path])} == set(own)
