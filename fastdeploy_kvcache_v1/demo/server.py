"""The server that the demo plays against: the embedded one, or FastDeploy over a CPU worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..bench_serve.server_process import running_server
from ..embedded.model_choice import embedded_model, fastdeploy_cpu_model
from ..embedded.text import load_tokenizer
from ..errors import ConfigError
from .player import Outcome, play_all
from .scenario import MAX_TOKENS, Request
from .setups import Setup

SERVED_NAME = "demo"

RESERVED_BY_FASTDEPLOY = 2
"""Its `enc_dec_block_num`: it refuses a device tier without them."""


@dataclass(frozen=True)
class DemoServer:
    """How to start one, whatever the set-up."""

    model_path: Path | None
    """None is the random model."""
    flags: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    reserved_blocks: int = 0
    """On the device, beside those of the longest request."""

    @classmethod
    def embedded(cls, model: str | None) -> DemoServer:
        """Fetches SmolLM2, with a progress bar, unless `model` names another one."""
        path = embedded_model(model)
        return cls(path, ("--embedded", *(() if path is None else ("--model", str(path)))))

    @classmethod
    def fastdeploy(cls, checkout: Path, model: str | None) -> DemoServer:
        """FastDeploy from its source tree `checkout`. Raises `ConfigError` when there is none, `ModelFetchError`."""
        root = checkout.resolve()
        if not (root / "fastdeploy" / "envs.py").is_file():
            raise ConfigError(f"--fastdeploy: {checkout} is no FastDeploy checkout")
        word = fastdeploy_cpu_model(model or "smollm2")
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        named = () if word is None else ("--model", word)
        return cls(
            None if word is None else Path(word),
            ("--fastdeploy-cpu", *named),
            {"PYTHONPATH": path},
            RESERVED_BY_FASTDEPLOY,
        )

    def num_tokens(self, request: Request) -> int:
        """Of `request` without its history, and of its answer."""
        messages = request.messages({}, {}) if not request.history else []
        return len(load_tokenizer(self.model_path).apply_chat_template(messages)) + MAX_TOKENS

    def play(
        self, setup: Setup, requests: Sequence[Request], on_outcome: Callable[[Setup, Outcome], object]
    ) -> list[Outcome]:
        """All requests, against a server that is started for them. Raises `WorkerDiedError`."""
        flags = (*self.flags, "--served-model-name", SERVED_NAME, *setup.flags)
        with running_server(flags, self.environment) as url:
            return play_all(
                url,
                requests,
                model=SERVED_NAME,
                caches=setup.caches,
                on_outcome=lambda outcome: on_outcome(setup, outcome),
            )
