from .runners import expected, make_runner, model

__all__ = ["expected", "make_runner", "model"]
