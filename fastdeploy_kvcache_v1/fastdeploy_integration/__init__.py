"""The only room that knows FastDeploy: patch tables, and the functions that their rows name."""

from collections.abc import Callable
from typing import Any

Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
"""Parameters of a function of a `wrap` row, as `wrapt` passes them."""
