"""A point release of 2.6 with other bodies, made here: it switches prefix caching off at decode, and decides anew who
makes the tensors of the cache.
"""

import os
import shutil

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.overlay import Overlay
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.release import fastdeploy_at
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import checkout_variable, table_for

from .fastdeploy_trees import tree
from .role_servers import PROMPTS, ask, servers, wait_idle

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(900)]

RELEASE = "2.6"
TOKENIZER, TENSORS = "self.tokenizer = self.model\n", "create_cache_tensor = profile or "
CHANGES = {
    "engine/args_utils.py": (
        TOKENIZER,
        f'{TOKENIZER}        if self.splitwise_role == "decode":\n            self.enable_prefix_caching = False\n',
        1,
    ),
    "worker/gpu_model_runner.py": (TENSORS, f"{TENSORS}self.device_id >= 0 or ", 2),
    "spec_decode/mtp.py": (TENSORS, f"{TENSORS}self.device_id >= 0 or ", 2),
}
"""By file: what is there, what is there instead, and how often."""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Where tests look for 2.6 from now on."""
    released, made = tree(RELEASE), tmp_path / "checkout"
    shutil.copytree(released / "fastdeploy", made / "fastdeploy", copy_function=os.symlink)
    (made / "setup.py").symlink_to(released / "setup.py")
    for name, (old, new, times) in CHANGES.items():
        path = made / "fastdeploy" / name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == times
        path.unlink()
        path.write_text(text.replace(old, new), encoding="utf-8")
    monkeypatch.setenv(checkout_variable(RELEASE), str(made))
    return made


def test_who_makes_the_tensors_of_the_cache_may_change(checkout):
    changed = Overlay(table_for(RELEASE), fastdeploy_at(checkout).root).changed_bodies()
    assert [each.target for each in changed] == ["fastdeploy.engine.args_utils:EngineArgs.__post_init__"]
    assert not changed[0].must_hold


def test_its_servers_start_and_decode_caches_prefixes(checkout, tmp_path):
    with servers(RELEASE, tmp_path) as made:
        mixed, prefill, decode = (made.begin(role, role) for role in ("mixed", "prefill", "decode"))
        made.wait_ready()
        with made.router.client() as client, mixed.client() as other:
            answers = {ask(each, PROMPTS[0]) for each in (other, client, client)}
        assert len(answers) == 1
        wait_idle(prefill, decode)
        for server in (mixed, prefill, decode):
            assert server.metrics()["device_cached_blocks"] > 0
            logs = "".join(path.read_text(errors="replace") for path in server.logs.rglob("*.log"))
            assert "is the cache manager of FastDeploy 2.6: " in logs
