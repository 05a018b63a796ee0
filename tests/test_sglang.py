"""A run on SGLang: trains end to end, survives the server's death, leaves no process behind."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from kr.rl.buffer import ReplayBuffer

ROOT = pathlib.Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    not (ROOT / ".venv-sglang" / "kr-sglang.stamp").is_file(),
    reason="SGLang is not installed: bash launch/sglang.sh --install, or launch/test.sh --all")]
FLAGS = ["--config=configs/quickstart.py:tiny", "--config.server.kind=sglang",
         "--config.server.start_timeout_s=600", "--config.server.slots=16",
         "--config.rl.tasks_per_step=2", "--config.rl.group_size=3", "--config.eval.tasks=2"]


def stat_of(pid):
  """(state, parent, process group) of a process, or None when it is gone."""
  try:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
  except (FileNotFoundError, ProcessLookupError):
    return None
  return fields[0], int(fields[1]), int(fields[2])


def processes(test):
  """The ids of the processes, zombies aside, that satisfy test(pid, parent, group)."""
  found = []
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    pid = int(path.name)
    if (stat := stat_of(pid)) and stat[0] != "Z" and test(pid, *stat[1:]):
      found.append(pid)
  return found


def server_of(trainer):
  """The process group of the trainer's server, or None while there is none."""
  own = processes(lambda pid, parent, group: parent == trainer and group == pid)
  return next((pid for pid in own if b"sglang" in command_of(pid)), None)  # tools have groups too


def command_of(pid):
  try:
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
  except (FileNotFoundError, ProcessLookupError):
    return b""


def members(group):
  return processes(lambda pid, parent, g: g == group)


def wait_for(condition, trainer, log, seconds=900):
  deadline = time.monotonic() + seconds
  while not (value := condition()):
    assert trainer.poll() is None, log.read_text()[-4000:]
    assert time.monotonic() < deadline, log.read_text()[-4000:]
    time.sleep(0.1)
  return value


def metrics(workdir):
  path = workdir / "metrics.jsonl"
  return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.fixture(name="start")
def fixture_start(tmp_path):
  """start(*flags) -> (trainer's process, workdir, log); what still runs at the end is killed."""
  started = []

  def start(*flags):
    log, workdir = tmp_path / "log", tmp_path / "run"
    with open(log, "w") as file:
      started.append(subprocess.Popen(
          [sys.executable, "-m", "kr.train", f"--workdir={workdir}", *FLAGS, *flags], cwd=ROOT,
          stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": str(ROOT)}))
    return started[-1], workdir, log
  yield start
  for process in started:
    process.kill()
    process.wait()


def test_a_run_trains_on_sglang_and_goes_on_when_it_is_killed(start):
  trainer, workdir, log = start("--config.rl.steps=3")
  wait_for(lambda: metrics(workdir), trainer, log)
  first = server_of(trainer.pid)
  os.kill(first, signal.SIGKILL)
  second = wait_for(lambda: (found := server_of(trainer.pid)) != first and found, trainer, log)
  assert trainer.wait(1200) == 0, log.read_text()[-4000:]
  assert "restarting" in log.read_text()
  assert members(first) == members(second) == []
  rows = metrics(workdir)
  assert [row["step"] for row in rows] == [1, 2, 3]
  assert all(0 < row["logprob_gap"] < 1e-3 for row in rows)
  with ReplayBuffer(workdir / "buffer.db") as buffer:
    for step in (1, 2, 3):
      trajectories = buffer.all(step)
      assert len(trajectories) == 6
      versions = {v for t in trajectories for s in t.segments for v in s.versions if v >= 0}
      assert versions == {step - 1}
  assert not (workdir / "exports").exists()


def test_no_process_of_sglang_survives_the_kill_of_its_trainer(start):
  trainer, workdir, log = start("--config.rl.steps=1")
  group = wait_for(lambda: server_of(trainer.pid), trainer, log)
  wait_for(lambda: len(members(group)) > 3, trainer, log)  # its schedulers have started
  trainer.kill()
  trainer.wait()
  deadline = time.monotonic() + 30
  while members(group) and time.monotonic() < deadline:
    time.sleep(0.1)
  assert members(group) == []
