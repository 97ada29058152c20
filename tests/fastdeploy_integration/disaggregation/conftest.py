from tests.lab.fastdeploy_cpu.runners import expected, model

from .role_pairs import make_pair, pair

__all__ = ["expected", "make_pair", "model", "pair"]
