"""Activation inside one process: the trigger on `sys.meta_path`, the session, and refusals as one line."""

import os
import re
import sys

import pytest

from fastdeploy_kvcache_v1 import plugin, switch
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """A copy of `sys.meta_path` without our trigger, and no FastDeploy."""
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, plugin._Trigger)])
    monkeypatch.delitem(sys.modules, plugin.FASTDEPLOY, raising=False)


def triggers():
    return [each for each in sys.meta_path if isinstance(each, plugin._Trigger)]


def test_lookup_of_fastdeploy_starts_once_and_removes_the_trigger(monkeypatch):
    started = []

    def start():
        started.append(trigger.find_spec("fastdeploy"))

    monkeypatch.setattr(plugin, "_start", start)
    plugin.activate()
    (trigger,) = triggers()
    assert sys.meta_path[0] is trigger
    assert (trigger.find_spec("json"), started) == (None, [])
    assert trigger.find_spec("fastdeploy") is None
    assert (started, triggers()) == ([None], [])


def test_trigger_stays_after_a_start_that_failed(monkeypatch):
    started = []

    def fail():
        started.append(1)
        raise ConfigError("no")

    monkeypatch.setattr(plugin, "_start", fail)
    plugin.activate()
    (trigger,) = triggers()
    for _ in range(2):
        with pytest.raises(ConfigError):
            trigger.find_spec("fastdeploy")
    assert (len(started), triggers()) == (2, [trigger])
    plugin.stand_by()
    assert triggers() == []
    assert sys.meta_path, "other finders stay"
    with pytest.raises(ConfigError):
        plugin.register()
    assert len(triggers()) == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_start_names_the_session_before_the_overlay_starts(monkeypatch, enabled):
    told = []
    monkeypatch.setattr(plugin, "say_refusals_alone", lambda: told.append("refusals"))
    monkeypatch.setattr(plugin, "name_session", lambda: told.append("session"))
    monkeypatch.setattr(plugin, "is_enabled", lambda: enabled)
    monkeypatch.setattr(overlay, "start", lambda: told.append("overlay"))
    plugin.register()
    assert told == ["refusals", *(["session", "overlay"] if enabled else [])]


def test_session_is_named_once_by_eight_digits(monkeypatch):
    monkeypatch.delenv(switch.SESSION_VARIABLE, raising=False)
    switch.name_session()
    name = os.environ[switch.SESSION_VARIABLE]
    assert re.fullmatch("[0-9a-f]{8}", name)
    switch.name_session()
    assert os.environ[switch.SESSION_VARIABLE] == name


def test_refusal_is_one_line_and_other_errors_go_on(monkeypatch, capsys):
    others = []
    monkeypatch.setattr(sys, "excepthook", lambda *given: others.append(given))
    switch.say_refusals_alone()
    hook = sys.excepthook
    switch.say_refusals_alone()
    assert sys.excepthook is hook
    hook(ConfigError, ConfigError("got 1,\n expected 2"), None)
    assert capsys.readouterr().err == "fastdeploy-kvcache: error: got 1, expected 2\n"
    assert others == []
    error = ValueError("of the host")
    hook(ValueError, error, None)
    assert others == [(ValueError, error, None)]
