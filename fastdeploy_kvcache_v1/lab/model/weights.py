"""Reads tensors of a model directory's safetensors files, one at a time, as float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ...errors import ModelError


class Checkpoint:
    """Open files. Not thread-safe. Raises `ModelError`, one line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{path} is not a usable model directory: it has no *.safetensors file")
        self._file_of_tensor: dict[str, tuple[Path, Any]] = {}
        for file in files:
            handle = _open(file)
            self._file_of_tensor.update(dict.fromkeys(handle.keys(), (file, handle)))

    def read(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Tensor `name`, converted to float32; it must have exactly `shape`."""
        if name not in self._file_of_tensor:
            raise ModelError(f"{self._path}: tensor {name} is missing")
        file, handle = self._file_of_tensor[name]
        try:
            found = tuple(handle.get_slice(name).get_shape())
            if found != shape:
                raise ModelError(f"{file}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}")
            tensor = handle.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"cannot read tensor {name} from {file}: {error}") from error
        if str(tensor.dtype) not in ("paddle.float32", "paddle.float16", "paddle.bfloat16"):
            raise ModelError(f"{file}: tensor {name} has unsupported dtype {tensor.dtype}")
        # Through paddle because NumPy has no bfloat16.
        values: NDArray[np.float32] = tensor.astype("float32").numpy()
        return values


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="paddle")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
