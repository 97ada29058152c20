"""CUDA: streams and events by CuPy, the copy kernel and its launcher, the trial of copy paths."""
