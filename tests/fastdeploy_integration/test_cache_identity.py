"""Fields that say who shares a prefix, from a body of the API to a request of the engine. FAKE bodies and requests."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.contract.messages import CacheAccess
from fastdeploy_kvcache_v1.contract.sessions import UNTOLD, session_hint
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration import cache_identity
from fastdeploy_kvcache_v1.fastdeploy_integration.cache_identity import FIELDS, MAX_SALT_CHARACTERS, NAMES
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import ROWS_ATTRIBUTE

ASKED = {name: kind(1) for name, kind in FIELDS.items()} | {"cache_salt": "s", "skip_writing_prefix_cache": False}


@pytest.fixture
def bodies(monkeypatch):
    """A body, and a line of a batch file, which has a copy of it."""
    pydantic = pytest.importorskip("pydantic")
    module = ModuleType("fake_protocol")
    monkeypatch.setitem(sys.modules, "fake_protocol", module)
    module.Body = pydantic.create_model("Body", __module__="fake_protocol", prompt=(str, ...))
    module.Other = pydantic.create_model("Other", __module__="fake_protocol", prompt=(str, ...))
    module.Line = pydantic.create_model("Line", __module__="fake_protocol", body=(module.Body, ...))
    cache_identity.add_body_fields(module.Body)
    return module


def test_a_body_has_our_fields_also_in_a_line_of_a_batch_file(bodies):
    body = bodies.Body.model_validate({"prompt": "p", **ASKED})
    assert {name: getattr(body, name) for name in FIELDS} == ASKED
    line = bodies.Line.model_validate({"body": {"prompt": "p", **ASKED}})
    assert line.body.cache_salt == "s"
    plain = bodies.Body.model_validate({"prompt": "p", **dict.fromkeys(FIELDS)})
    assert [getattr(plain, name) for name in FIELDS] == [None] * len(FIELDS)


@pytest.mark.parametrize("salt", ["", 7, "x" * (MAX_SALT_CHARACTERS + 1)])
def test_what_is_no_salt_is_refused_wherever_it_comes_from(bodies, salt):
    with pytest.raises(ValueError, match="cache_salt must be a text of 1 to 1024 characters"):
        bodies.Body.model_validate({"prompt": "p", "cache_salt": salt})
    with pytest.raises(ConfigError, match="cache_salt must be a text of 1 to 1024 characters"):
        cache_identity.salt_of(SimpleNamespace(cache_salt=salt))
    for text, expected in ((None, b""), ("s", b"s"), ("x" * MAX_SALT_CHARACTERS, b"x" * 1024)):
        assert cache_identity.salt_of(SimpleNamespace(cache_salt=text)) == expected


@pytest.mark.parametrize(
    ("reads", "writes", "neither", "expected"),
    [
        (None, None, None, (True, True)),
        (True, False, False, (False, True)),
        (False, True, None, (True, False)),
        (None, False, True, (False, False)),
    ],
)
def test_the_access_of_a_task(reads, writes, neither, expected):
    task = SimpleNamespace(
        skip_reading_prefix_cache=reads, skip_writing_prefix_cache=writes, disable_prefix_caching=neither
    )
    assert cache_identity.access_of(task) == CacheAccess(*expected)
    task.skip_reading_prefix_cache = "yes"
    with pytest.raises(ConfigError, match="skip_reading_prefix_cache must be true or false, got 'yes'"):
        cache_identity.access_of(task)


SECRET = "ada@example.org"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("session_id", each) for each in ("", 7, [SECRET], SECRET * 100)),
        *(("return_in_s", each) for each in (-2, -0.5, "5", True, 1e300, float("nan"), 10**400, SECRET)),
        ("prompt_cache_key", [SECRET]),
    ],
)
def test_wrong_hint_in_a_body_is_refused_in_one_line_without_its_value(bodies, field, value):
    with pytest.raises(ValueError, match=field) as caught:
        bodies.Body.model_validate({"prompt": "p", field: value})
    (error,) = caught.value.errors(include_input=False, include_url=False)
    assert error["loc"] == (field,)
    assert "\n" not in error["msg"]
    assert SECRET not in error["msg"]


def hint_of(**fields):
    return cache_identity.session_of(SimpleNamespace(**dict.fromkeys([*NAMES, "return_in_s"]) | fields), b"salt")


def test_session_has_the_first_name_and_the_salt_also_without_either():
    names = {"session_id": "a", "prompt_cache_key": "b", "user": "c"}
    for name in names.copy():
        assert hint_of(**names, return_in_s=2) == session_hint(names[name], b"salt", 2)
        names[name] = ""
    assert hint_of(return_in_s=-1) == session_hint(None, b"salt", -1)
    untold = SimpleNamespace(**dict.fromkeys([*NAMES, "return_in_s"]))
    assert cache_identity.session_of(untold, b"") == UNTOLD


def test_wrong_hint_that_no_api_has_checked_counts_as_not_given():
    assert hint_of(session_id=7, user="c", return_in_s="soon") == session_hint("c", b"salt")
    assert hint_of(session_id=["a"], prompt_cache_key={}, user=7, return_in_s=1) == session_hint(None, b"salt", 1)


def test_a_field_that_fastdeploy_has_itself_stays_as_it_is():
    pydantic = pytest.importorskip("pydantic")
    body = pydantic.create_model("Body", __module__=__name__, disable_prefix_caching=(bool, False))
    cache_identity.add_body_fields(body)
    assert body.model_validate({"cache_salt": "s"}).disable_prefix_caching is False
    with pytest.raises(ValueError, match="disable_prefix_caching"):
        body.model_validate({"disable_prefix_caching": None})
    request = type("Theirs", (), {"disable_prefix_caching": False})
    cache_identity.add_request_attributes(request)
    assert (request.disable_prefix_caching, request.cache_salt) == (False, None)


class Request:
    """FastDeploy's: what it does not know is lost on its way."""

    def __init__(self, **metadata):
        vars(self).update(metadata)


cache_identity.add_request_attributes(Request)


def test_fields_survive_the_way_to_the_engine_and_back():
    request = cache_identity.request_from_dict(lambda d: Request(), None, (ASKED,), {})
    assert {name: getattr(request, name) for name in FIELDS} == ASKED
    assert cache_identity.request_to_dict(lambda: {"id": 1}, request, (), {}) == {"id": 1, **ASKED}
    plain = cache_identity.request_from_dict(lambda d: Request(), None, (), {"d": {}})
    assert cache_identity.request_to_dict(dict, plain, (), {}) == {}


@pytest.mark.parametrize("named", [False, True])
def test_a_body_is_asked_first_and_metadata_brings_nothing_that_only_the_engine_attaches(named):
    def from_generic_request(req):
        return Request(**{"cache_salt": "of metadata", ROWS_ATTRIBUTE: "forged"})

    def made(body):
        args, kwargs = ((), {"req": body}) if named else ((body,), {})
        return cache_identity.request_from_body(from_generic_request, None, args, kwargs)

    request = made(SimpleNamespace(**ASKED))
    assert request.cache_salt == "s"
    assert ROWS_ATTRIBUTE not in vars(request)
    assert made(SimpleNamespace()).cache_salt == "of metadata", "embeddings have a body without our fields"
