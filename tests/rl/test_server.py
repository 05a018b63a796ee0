"""The server process is started, watched, restarted, and never left behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

from kr.model import checkpoint
from kr.model import transformer
from kr.model.config import ModelConfig
from kr.rl.server import ServerError, ServerProcess

CFG = ModelConfig(vocab=31, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp=16, max_len=128)


@pytest.fixture(name="model", scope="module")
def fixture_model(tmp_path_factory):
  path = tmp_path_factory.mktemp("model") / "a"
  checkpoint.save_policy(path, transformer.init(CFG, 0), CFG)
  return path


def process_exists(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  try:  # a zombie has ended
    with open(f"/proc/{pid}/stat") as f:
      return f.read().rsplit(")", 1)[1].split()[0] != "Z"
  except FileNotFoundError:
    return False


def gone(pid, seconds=20):
  deadline = time.monotonic() + seconds
  while process_exists(pid) and time.monotonic() < deadline:
    time.sleep(0.05)
  return not process_exists(pid)


def test_a_killed_server_is_noticed_and_restarted_at_the_same_address(model, tmp_path):
  with ServerProcess(model, slots=2, max_len=64, log=tmp_path / "log", compile_cache="") as server:
    url, first = server.url, server.pid
    assert server.healthy()
    os.kill(first, signal.SIGKILL)
    assert gone(first)
    deadline = time.monotonic() + 20  # the kernel may take a moment to hand over the status
    while server.alive() and time.monotonic() < deadline:
      time.sleep(0.05)
    assert not server.alive() and not server.healthy()
    server.restart(version=7)
    assert server.healthy() and server.url == url and server.restarts == 1
    second = server.pid
  assert gone(second) and not server.alive()
  server.stop()  # again: nothing happens


def test_a_server_that_cannot_start_says_why(tmp_path):
  server = ServerProcess(tmp_path / "none", log=tmp_path / "log", compile_cache="")
  server.start()
  with pytest.raises(ServerError, match="(?s)status 1.*there is no model at"):
    server.wait_healthy()
  server.stop()


def test_a_server_that_is_too_slow_is_stopped(model, tmp_path):
  server = ServerProcess(model, log=tmp_path / "log", compile_cache="")
  server.start()
  pid = server.pid
  with pytest.raises(ServerError, match="not ready in time"):
    server.wait_healthy(timeout_s=0.0)
  assert gone(pid)


def test_no_server_survives_the_kill_of_its_trainer(model, tmp_path):
  script = ("import sys, time\n"
            "from kr.rl.server import ServerProcess\n"
            f"server = ServerProcess({str(model)!r}, slots=2, max_len=64, "
            f"log={str(tmp_path / 'log')!r}, compile_cache='')\n"
            "server.start(); server.wait_healthy()\n"
            "print(server.pid, flush=True); time.sleep(600)\n")
  root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
  trainer = subprocess.Popen(
      [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root)
  try:
    pid = int(trainer.stdout.readline())
    assert process_exists(pid)
    trainer.kill()
    assert gone(pid)
  finally:
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
