"""Decoder models of the embedded server: Llama, Qwen2 and Qwen3, from a Hugging Face directory or random weights.

`config` describes a model and `reproducible` prepares the process; neither imports paddle. `decoder` computes.
"""

from .config import ModelConfig, load_model_config
from .reproducible import configure_reproducible_math, default_threads

__all__ = ["ModelConfig", "configure_reproducible_math", "default_threads", "load_model_config"]
