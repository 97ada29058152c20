"""A FAKE FDConfig: what engines, workers and the patches of the configuration ask of FastDeploy's."""

from types import SimpleNamespace

from fastdeploy_kvcache_v1.fastdeploy_integration.settings import ADDED_FLAGS

SECTIONS = {
    "cache_config": {
        **{flag.name: flag.default for flag in ADDED_FLAGS},
        "block_size": 4, "total_block_num": 8, "num_cpu_blocks": 4, "host_block_bytes": None,
        "swap_space": None, "sized_by_swap_space": False, "enable_prefix_caching": True, "enable_output_caching": True,
        "write_policy": "write_back", "write_through_threshold": 2, "eviction_policy": "lru",
        "kvcache_storage_backend": None, "kvcache_storage_dir": "/unused", "kvcache_storage_gib": 1.0,
        "disable_chunked_mm_input": False, "local_rdma_comm_ports": None,
    },
    "load_config": {"dynamic_load_weight": False, "load_choices": "default_v1"},
    "model_config": {
        "model": "/models/small/", "dtype": "bfloat16", "num_hidden_layers": 2,
        "quantization": None, "quantization_config": None,
    },
    "parallel_config": {
        "tensor_parallel_size": 1, "data_parallel_size": 1, "tensor_parallel_rank": 3, "local_data_parallel_id": 1,
        "local_engine_worker_queue_port": "8001",
    },
    "scheduler_config": {"max_num_batched_tokens": 512, "splitwise_role": "mixed", "name": "local"},
    "speculative_config": {"method": None, "num_speculative_tokens": 2},
    "graph_opt_config": {"graph_opt_level": 0},
    "routing_replay_config": {"enable_routing_replay": False},
    "router_config": {"router": "127.0.0.1:9000"},
    "": {"quant_config": None, "worker_num_per_node": 8, "max_chips_per_node": 8, "host_ip": "10.0.0.1"},
}  # fmt: skip


def fd_config(**given):
    """`given`: values by their names, wherever they belong; sizes of the model where no other name is known."""
    made = SimpleNamespace(**SECTIONS[""])
    for section, values in SECTIONS.items():
        if section:
            setattr(made, section, SimpleNamespace(**values))
    for name, value in given.items():
        owner = next((section for section, values in SECTIONS.items() if name in values), "model_config")
        setattr(made if name in SECTIONS else getattr(made, owner, made), name, value)
    return made
