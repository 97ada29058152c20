"""The Jinja chat template of a model, in a sandbox: a template is foreign code.

The sandbox keeps it from Python. It does not keep it from an endless loop or from filling the memory, not even while
it is compiled (constants are folded): that is why it runs in the intake process, which has limits.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...errors import ConfigError, ModelError
from ...model.hf_json import read_file

MAX_CHARACTERS = 1 << 25
"""Of a rendered conversation."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """A template, or none: then `render` says so."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._template: jinja2.Template | None = None

    @property
    def exists(self) -> bool:
        return self._source is not None

    def compile(self) -> None:
        """Raises `ModelError` when it is not a Jinja template."""
        if self._source is None or self._template is not None:
            return
        try:
            self._template = _environment().from_string(self._source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error

    @classmethod
    def load(cls, path: Path, settings: Mapping[str, Any]) -> ChatTemplate:
        """From `chat_template.jinja` in `path`, else from `settings` (tokenizer_config.json)."""
        file = path / "chat_template.jinja"
        source = _read_text(file) if file.exists() else settings.get("chat_template")
        if isinstance(source, list):  # several named templates
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if source is not None and not isinstance(source, str):
            raise ModelError(f"{path / 'tokenizer_config.json'}: chat_template must be text")
        return cls(source, _special_tokens(settings))

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """Text of the conversation with the start of the assistant's turn. Raises `ConfigError`, one line.

        `variables` reach the template beside its usual ones, or in their place.
        """
        self.compile()
        if self._template is None:
            raise ConfigError("this model has no chat template: send the prompt to /v1/completions")
        try:
            usual = {"add_generation_prompt": True, "tools": None, "documents": None, **self._special_tokens}
            conversation = {"messages": [dict(message) for message in messages]}
            pieces = self._template.generate({**usual, **(variables or {}), **conversation})
            return "".join(_at_most(MAX_CHARACTERS, pieces))
        except Exception as error:  # the edge to code that is not ours: anything it raises is a refusal
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"the model's chat template rejects these messages: {reason}") from error


def _at_most(size: int, pieces: Iterable[str]) -> Iterator[str]:
    for piece in pieces:
        size -= len(piece)
        if size < 0:
            raise ValueError(f"it writes more than {MAX_CHARACTERS} characters")
        yield piece


def _read_text(file: Path) -> str:
    try:
        return read_file(file).decode("utf-8")
    except ValueError as error:
        raise ModelError(f"cannot read {file}: {error}") from error


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Plain strings, or the `content` of serialized added tokens."""
    tokens = {name: settings.get(name) for name in _SPECIAL_TOKENS}
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _environment() -> ImmutableSandboxedEnvironment:
    """With the names that templates on the hub rely on."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
