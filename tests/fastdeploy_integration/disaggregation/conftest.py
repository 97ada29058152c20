from tests.fastdeploy_integration.cpu_worker.runners import expected, model

from .role_pairs import make_pair, pair

__all__ = ["expected", "make_pair", "model", "pair"]
