"""What servers serve: the random model, whose tokens say that each byte of its cache was right."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fastdeploy_kvcache_v1.lab.model.directory import write_random_directory


class Model(NamedTuple):
    write: Callable[[Path], object]
    token_bytes: tuple[int, int]
    """Of a layer, in bfloat16: on one rank, and on each of two."""
    attention_backend: str = "APPEND_ATTN"

    def block_bytes(self, ranks: int) -> int:
        """On each of them."""
        return 4 * 64 * self.token_bytes[ranks - 1]


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "kv_lora_rank": 128, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 64,
    "n_routed_experts": 8, "num_key_value_heads": 8,
}  # fmt: skip


def write_latent(directory: Path) -> None:
    path = write_random_directory(directory) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | DEEPSEEK), encoding="utf-8")


PLAIN = Model(write_random_directory, (2 * 4 * 16 * 2, 2 * 2 * 16 * 2))
OTHER_WEIGHTS = PLAIN._replace(write=partial(write_random_directory, seed=1))
LATENT = Model(write_latent, (144 * 2, 144 * 2), "MLA_ATTN")
"""DeepSeek's: every rank has the whole vector."""
