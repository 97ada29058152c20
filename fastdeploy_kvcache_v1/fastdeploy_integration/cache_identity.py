"""Request fields that decide who shares blocks, whether a request reads and writes the cache, and its session.

They go from the body, through the dictionary that the API server sends, to the engine's `Request`. The supported
releases have no LoRA adapters, whose names would belong here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

from ..contract.messages import CacheAccess
from ..contract.sessions import SessionHint, checked_return, checked_session_id, session_hint
from ..errors import ConfigError
from . import Args, Kwargs, Wrapped
from .transport import take_off

SALT, NO_READS, NO_WRITES = "cache_salt", "skip_reading_prefix_cache", "skip_writing_prefix_cache"
NEITHER = "disable_prefix_caching"
"""Both at once, by FastDeploy's name; a release may have it."""

SESSION, RETURN = "session_id", "return_in_s"
NAMES = (SESSION, "prompt_cache_key", "user")
"""Fields that name the session, the first one given. FastDeploy has `user`, and its engine does not get it."""

FIELDS: dict[str, type] = {SALT: str, NO_READS: bool, NO_WRITES: bool, NEITHER: bool}
FIELDS |= {**dict.fromkeys(NAMES, str), RETURN: float}

MAX_SALT_CHARACTERS = 1024


def add_body_fields(body: Any) -> None:
    """Extend a pydantic model of FastDeploy's API, which drops unknown fields."""
    from pydantic.fields import FieldInfo

    for name in (each for each in FIELDS if each not in body.model_fields):
        body.model_fields[name] = FieldInfo(annotation=checked_kind(name) | None, default=None)
    body.model_rebuild(force=True)
    for model in vars(sys.modules[body.__module__]).values():  # a line of a batch file has a compiled copy of its body
        if any(field.annotation is body for field in getattr(model, "model_fields", {}).values()):
            model.model_rebuild(force=True)


def checked_kind(name: str) -> Any:
    """The type of a field in a pydantic model. Its errors are without the value."""
    from pydantic import BeforeValidator

    checks = {SALT: _checked_salt, SESSION: checked_session_id, RETURN: checked_return}
    return Annotated[FIELDS[name], BeforeValidator(checks[name])] if name in checks else FIELDS[name]


def add_request_attributes(request: Any) -> None:
    """Extend `Request`: fields without a value are None."""
    for name in (each for each in FIELDS if each not in vars(request)):
        setattr(request, name, None)


def request_from_dict(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps `Request.from_dict`."""

    def make(d: dict[str, Any]) -> Any:
        request = wrapped(d)
        _copy(d.get, request)
        return request

    return make(*args, **kwargs)


def request_from_body(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps `Request.from_generic_request`. Bodies of embeddings and rewards lack our fields.

    Values that FastDeploy took from `metadata` stay, unless the body has the field or only the engine may attach them.
    """
    request = wrapped(*args, **kwargs)
    take_off(request)
    body = args[0] if args else kwargs["req"]
    _copy(lambda name: getattr(body, name, None), request)
    return request


def request_to_dict(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Wraps `Request.to_dict`, used by schedulers of several engines."""
    made: dict[str, Any] = wrapped(*args, **kwargs)
    made.update({name: value for name in FIELDS if (value := getattr(instance, name)) is not None})
    return made


def _copy(get: Callable[[str], Any], request: Any) -> None:
    for name in FIELDS:
        if (value := get(name)) is not None:
            setattr(request, name, value)


def salt_of(task: Any) -> bytes:
    """Raises `ConfigError` for a value that the API would refuse: `metadata` and other programs bypass its check."""
    salt = task.cache_salt
    if salt is None:
        return b""
    try:
        return _checked_salt(salt).encode("utf-8", "surrogatepass")
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _checked_salt(value: object) -> str:
    """Raises `ValueError`, without the value: it may be a secret."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_SALT_CHARACTERS:
        raise ValueError(f"cache_salt must be a text of 1 to {MAX_SALT_CHARACTERS} characters; leave it out to share")
    return value


def access_of(task: Any) -> CacheAccess:
    """Raises `ConfigError` for a value that is not a boolean."""
    for name in (NO_READS, NO_WRITES, NEITHER):
        if getattr(task, name) not in (None, True, False):
            raise ConfigError(f"{name} must be true or false, got {getattr(task, name)!r}")
    uses = not task.disable_prefix_caching
    return CacheAccess(uses and not task.skip_reading_prefix_cache, uses and not task.skip_writing_prefix_cache)


def session_of(task: Any, salt: bytes) -> SessionHint:
    """A value that the API would refuse counts as not given: `metadata` and other programs bypass its check."""
    given = (getattr(task, name) for name in NAMES)
    name = next((each for each in given if each and isinstance(each, str)), None)
    try:
        return session_hint(name, salt, checked_return(getattr(task, RETURN)))
    except ValueError:
        return session_hint(name, salt)
