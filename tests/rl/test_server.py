"""The server process is started, watched, restarted, and never left behind."""

import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from kr.model import checkpoint
from kr.model import transformer
from kr.model.config import ModelConfig
from kr.rl.server import ServerError, ServerProcess

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
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
  trainer = subprocess.Popen(
      [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
  try:
    pid = int(trainer.stdout.readline())
    assert process_exists(pid)
    trainer.kill()
    assert gone(pid)
  finally:
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()


def test_a_server_of_an_unknown_kind_is_refused(model):
  with pytest.raises(ServerError, match="server.kind='vllm' must be one of kr, sglang"):
    ServerProcess(model, kind="vllm")


def test_a_policy_that_sglang_cannot_serve_is_refused_before_anything_starts(model, tmp_path):
  with pytest.raises(ServerError, match="SGLang reads Hugging Face directories"):
    ServerProcess(model, kind="sglang").start()
  (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
  with pytest.raises(ServerError, match="max_len=65 is more than the 64 tokens of the model"):
    ServerProcess(tmp_path, kind="sglang", max_len=65).start()


SGLANG = ROOT / "launch" / "sglang.sh"


@pytest.mark.parametrize("flags, status, text", [
    (["--model", "/no/model"], 1, "'/no/model' is no Hugging Face directory.*kr.convert"),
    (["--model"], 1, "--model needs a value"),
    (["--install", "--device=tpu"], 1, "--device=tpu: give cpu or cuda")])
def test_the_launcher_of_sglang_says_what_is_wrong_before_it_installs(flags, status, text):
  done = subprocess.run(["bash", SGLANG, *flags], capture_output=True, text=True)
  assert done.returncode == status and re.search(text, done.stderr)


def test_where_sglang_cannot_be_had_its_launcher_says_why_and_ends_with_3(tmp_path):
  """A copy of launch/ in a place without Python 3.11 or pyenv."""
  shutil.copytree(SGLANG.parent, tmp_path / "launch")
  (tmp_path / "bin").mkdir()
  for name in ("bash", "cat", "cksum", "dirname", "flock", "uname"):
    (tmp_path / "bin" / name).symlink_to(shutil.which(name))
  done = subprocess.run(
      ["bash", tmp_path / "launch" / "sglang.sh", "--install", "--device=cpu"],
      env={"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}, capture_output=True, text=True)
  assert done.returncode == 3 and "cannot be had here" in done.stderr, done.stderr
  assert "Python 3.11" in done.stderr or "x86-64" in done.stderr
  assert not (tmp_path / ".venv-sglang").exists()


def installed_by(tmp_path, pip_status):
  """The result of an install with a Python whose venv and pip only note that they were called."""
  shutil.copytree(SGLANG.parent, tmp_path / "launch", dirs_exist_ok=True)
  (tmp_path / "bin").mkdir(exist_ok=True)
  python = tmp_path / "bin" / "python3.11"
  python.write_text(f"""#!/usr/bin/env bash
if [[ "$1 $2" == "-m venv" ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi
if [[ "$1 $2" == "-m pip" ]]; then echo "$@" >> {tmp_path}/pip.log; exit {pip_status}; fi
""")
  python.chmod(0o755)
  return subprocess.run(
      ["bash", tmp_path / "launch" / "sglang.sh", "--install", "--device=cpu"],
      env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}, capture_output=True,
      text=True)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="SGLang on a CPU needs x86-64")
def test_an_install_that_was_cut_short_is_made_anew_and_a_whole_one_is_not(tmp_path):
  cut = installed_by(tmp_path, 1)
  assert cut.returncode == 1 and "the install failed" in cut.stderr
  whole = installed_by(tmp_path, 0)
  calls = (tmp_path / "pip.log").read_text().count("install")
  assert whole.returncode == 0 and (tmp_path / ".venv-sglang" / "kr-sglang.stamp").is_file()
  again = installed_by(tmp_path, 1)
  assert again.returncode == 0 and again.stderr == ""
  assert (tmp_path / "pip.log").read_text().count("install") == calls > 1
