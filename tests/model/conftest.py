"""The math library must be set up before paddle is imported by any test module of this folder."""

from fastdeploy_kvcache_v1.embedded.model import configure_reproducible_math

configure_reproducible_math()
