"""Read tensors out of a model directory's safetensors files, one at a time, as float32."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..errors import ModelError
from .hf_json import read_json

INDEX_FILE = "model.safetensors.index.json"


class Checkpoint:
    """A context manager over the open files. Not thread-safe. Raises `ModelError`, one line, for whatever is wrong."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_of_tensor = _tensor_files(path)
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of_tensor

    def read(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Tensor `name`, converted to float32; it must have exactly `shape`."""
        file = self._file_of_tensor.get(name)
        if file is None:
            raise ModelError(f"{self._path}: tensor {name} is missing")
        handle = self._handle(file)
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

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = _open(file)
        return self._open[file]


def _open(file: Path) -> Any:
    if not file.is_file():
        raise ModelError(f"{file.parent}: weight file {file.name} is missing")
    try:
        return safe_open(str(file), framework="paddle")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error


def _tensor_files(path: Path) -> dict[str, Path]:
    """File of every tensor: from the index of a sharded checkpoint, else all of `model.safetensors`."""
    if (path / INDEX_FILE).exists():
        weight_map = read_json(path / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ModelError(f"{path / INDEX_FILE}: weight_map must name the file of each tensor")
        return {name: path / Path(file).name for name, file in weight_map.items()}
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path} is not a usable model directory: it has no *.safetensors file")
    return {name: file for file in files for name in _open(file).keys()}  # noqa: SIM118  (not a mapping)
