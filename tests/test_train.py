"""The main job as a user starts it: every stage, resumed after every kind of end."""

import json
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from kr.rl.buffer import ReplayBuffer

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).resolve().parent.parent
# The quick start in miniature, and smaller still.
MICRO = [
  "--config=configs/quickstart.py:tiny",
  "--config.rl.tasks_per_step=2",
  "--config.rl.group_size=3",
  "--config.rl.steps=2",
  "--config.eval.tasks=2",
  "--config.server.slots=8",
]

# Runs kr.train and kills it with SIGKILL at the named place, the first time a step gets there.
KILLED = """
import os, signal, sys, threading
from kr import serving, train, wiring
from kr.model.checkpoint import Checkpoints
from kr.rl.buffer import ReplayBuffer
from kr.rl.learner import Learner

where = sys.argv.pop(1)
die = lambda: os.kill(os.getpid(), signal.SIGKILL)

def put(self, *args, real=ReplayBuffer.put, count=[0], **options):
  real(self, *args, **options)
  count[0] += 1
  if count[0] == 3:
    die()

def update(self, *args, real=Learner.update):
  real(self, *args)
  die()

def save(self, step, *args, real=Checkpoints.save_async):
  threading.Timer(0.02, die).start()
  real(self, step, *args)
  die()

def wait(self, real=Checkpoints.wait):
  begun = self._begun and self._begun[0]
  real(self)
  if begun:  # step 0 is the starting policy
    die()

async def publish(self, *args):
  die()

if where == "rollout":
  ReplayBuffer.put = put
elif where == "update":
  Learner.update = update
elif where == "checkpoint":
  Checkpoints.save_async = save
elif where == "whole checkpoint":
  Checkpoints.wait = wait
elif where == "publish":
  serving.Session.publish = publish
wiring.main_guard(train.main)
"""


def train(workdir, *flags, code=None, timeout_s=300):
  command = [
    sys.executable,
    *(["-c", KILLED, code] if code else ["-m", "kr.train"]),
    f"--workdir={workdir}",
    *flags,
  ]
  return subprocess.run(
    command,
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=timeout_s,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )


def rows(workdir):
  """id -> (state, step_made, consumed_step) of every trajectory in the buffer."""
  with sqlite3.connect(workdir / "buffer.db") as db:
    return {
      i: tuple(r)
      for i, *r in db.execute("SELECT id, state, step_made, consumed_step FROM trajectories")
    }


def metrics(workdir):
  return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A complete run of the tiny quick start, and what it printed."""
  workdir = tmp_path_factory.mktemp("run") / "tiny"
  return workdir, train(workdir, "--config=configs/quickstart.py:tiny")


def test_tiny_quick_start_passes_through_every_stage(run):
  workdir, done = run
  assert done.returncode == 0, done.stderr[-3000:]
  assert "Traceback" not in done.stderr
  summary = json.loads((workdir / "summary.json").read_text())
  for side in ("before", "after"):
    for key in ("pass@1", "pass@4", "turns", "tool_calls", "pages", "format_fault_rate"):
      low, high = summary[side]["intervals"][key]
      assert low <= summary[side][key] <= high
    assert summary[side]["trajectories"] == 32
  assert 0 < summary["max_logprob_gap"] < 1e-3
  assert summary["guesser_share"] < 0.05
  assert summary["seed"] == 0 and summary["commit"] and summary["hardware"]
  assert [row["step"] for row in metrics(workdir)] == [1, 2, 3]
  assert all(row["trajectories"] == 16 for row in metrics(workdir))
  assert "before" in done.stdout and "after" in done.stdout and "report.html" in done.stdout
  assert "<svg" in (workdir / "report.html").read_text()
  assert list((workdir / "tensorboard").iterdir())


def test_tiny_starting_policy_answers_some_questions_but_is_not_good(run):
  summary = json.loads((run[0] / "summary.json").read_text())
  assert 0 < summary["before"]["pass@1"] < 0.6


def test_same_command_says_that_the_run_is_complete(run):
  workdir, _ = run
  before = (workdir / "summary.json").stat().st_mtime_ns
  again = train(workdir, "--config=configs/quickstart.py:tiny")
  assert again.returncode == 0 and "complete at 3 steps" in again.stdout
  assert (workdir / "summary.json").stat().st_mtime_ns == before


def test_another_config_in_the_same_workdir_is_refused_and_the_difference_named(run):
  workdir, _ = run
  other = train(workdir, "--config=configs/quickstart.py:tiny", "--config.rl.gamma=0.5")
  assert other.returncode == 2 and "Traceback" not in other.stderr
  assert "rl.gamma: 0.9 → 0.5" in other.stderr


def test_more_steps_extend_a_finished_run(run):
  workdir, _ = run
  more = train(workdir, "--config=configs/quickstart.py:tiny", "--config.rl.steps=4")
  assert more.returncode == 0, more.stderr[-3000:]
  assert [row["step"] for row in metrics(workdir)] == [1, 2, 3, 4]
  assert json.loads((workdir / "summary.json").read_text())["config"]["rl"]["steps"] == 4


def test_kill_9_anywhere_loses_no_trajectory_and_trains_none_twice(tmp_path):
  workdir, seen = tmp_path / "run", {}
  for where in ("rollout", "update", "checkpoint", "publish", "whole checkpoint"):
    killed = train(workdir, *MICRO, code=where)
    assert killed.returncode == -signal.SIGKILL, (where, killed.stderr[-3000:])
    now = rows(workdir)
    finished = {i for i, (state, *_) in now.items() if state == "finished"}
    assert set(seen) <= finished, f"lost by a kill in {where}"
    seen = {i: now[i] for i in finished}
    assert seen, where
  done = train(workdir, *MICRO)
  assert done.returncode == 0, done.stderr[-3000:]
  final = rows(workdir)
  assert set(seen) <= set(final)
  # Two steps of 2 tasks x 3 samples: each trajectory trained once, in the step that made it.
  assert len(final) == 12
  assert all(state == "finished" and made == consumed for state, made, consumed in final.values())
  assert sorted(made for _, made, _ in final.values()) == [1] * 6 + [2] * 6
  assert [row["step"] for row in metrics(workdir)] == [1, 2]
  assert sum(row["trajectories"] for row in metrics(workdir)) == 12


def server_of(trainer):
  """The process id of the trainer's inference server, or None while there is none."""
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
      if parent == trainer and b"kr.serve" in (path / "cmdline").read_bytes():
        return int(path.name)
    except (OSError, ValueError, IndexError):
      continue  # it ended while we looked
  return None


def test_server_killed_in_mid_run_is_restarted_and_nothing_is_lost(tmp_path):
  workdir = tmp_path / "run"
  command = [sys.executable, "-m", "kr.train", f"--workdir={workdir}", *MICRO,
             "--config.rl.steps=3"]
  with open(tmp_path / "log", "w") as log, subprocess.Popen(
      command, cwd=ROOT, stdout=log, stderr=log,
      env={**os.environ, "PYTHONPATH": str(ROOT)}) as trainer:
    while not ((workdir / "metrics.jsonl").is_file() and metrics(workdir)):
      assert trainer.poll() is None, (tmp_path / "log").read_text()[-3000:]
      time.sleep(0.05)
    os.kill(server_of(trainer.pid), signal.SIGKILL)
    assert trainer.wait(300) == 0, (tmp_path / "log").read_text()[-3000:]
  assert "restarting" in (tmp_path / "log").read_text()
  assert [row["step"] for row in metrics(workdir)] == [1, 2, 3]
  assert all(state == "finished" and made == consumed
             for state, made, consumed in rows(workdir).values())
  assert len(rows(workdir)) == 18


def test_sigterm_leaves_within_its_grace_with_all_stored_and_the_same_command_goes_on(tmp_path):
  workdir = tmp_path / "run"
  command = [sys.executable, "-m", "kr.train", f"--workdir={workdir}", *MICRO,
             "--config.rl.steps=3", "--config.rollout.grace_s=60"]
  with open(tmp_path / "log", "w") as log, subprocess.Popen(
      command, cwd=ROOT, stdout=log, stderr=log,
      env={**os.environ, "PYTHONPATH": str(ROOT)}) as trainer:
    while not ((workdir / "metrics.jsonl").is_file() and metrics(workdir)):
      assert trainer.poll() is None, (tmp_path / "log").read_text()[-3000:]
      time.sleep(0.05)
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(90) == 128 + signal.SIGTERM, (tmp_path / "log").read_text()[-3000:]
  printed = (tmp_path / "log").read_text()
  assert "leaving within 60 s" in printed and "Traceback" not in printed
  done = {row["step"] for row in metrics(workdir)}
  assert (workdir / "checkpoints" / str(max(done))).is_dir()  # whole: its name is a number alone
  assert len(rows(workdir)) == 6 * (max(done) + 1)  # the next step's were begun
  again = train(workdir, *MICRO, "--config.rl.steps=3")
  assert again.returncode == 0, again.stderr[-3000:]
  assert [row["step"] for row in metrics(workdir)] == [1, 2, 3]
  assert all(state == "finished" and made == consumed
             for state, made, consumed in rows(workdir).values())


def test_a_run_that_acts_ahead_and_ends_steps_early_trains_each_once_and_mixes_no_turn(tmp_path):
  workdir = tmp_path / "run"
  done = train(workdir, *MICRO, "--config.rl.steps=5", "--config.rollout.max_staleness=1",
               "--config.rollout.enough=0.5", "--config.rollout.max_pauses=2",
               "--config.rollout.concurrency=4", "--config.rl.off_policy=tis")
  assert done.returncode == 0, done.stderr[-3000:]
  assert [row["step"] for row in metrics(workdir)] == [1, 2, 3, 4, 5]
  assert 0 < max(row["staleness_max"] for row in metrics(workdir)) <= 3
  assert sum(row["mixed_versions"] for row in metrics(workdir)) == 0
  stored = rows(workdir)
  consumed = [(made, step) for _, made, step in stored.values() if step is not None]
  assert len(stored) == 30 and sum(row["trajectories"] for row in metrics(workdir)) == len(consumed)
  assert all(made <= step <= made + 2 for made, step in consumed)
  with ReplayBuffer(workdir / "buffer.db") as buffer:
    trajectories = [t for step in range(1, 6) for t in buffer.all(step)]
  turns = [(t, turn) for t in trajectories for turn in t.turns]
  assert len({turn.version for _, turn in turns}) > 2
  assert all(set(t.segments[turn.segment].versions[turn.start:turn.stop]) == {turn.version}
             for t, turn in turns)


def test_starting_policy_can_be_made_again(tmp_path):
  workdir = tmp_path / "run"
  made = train(workdir, *MICRO, "--config.rl.steps=0", "--config.start.rebuild=True",
               "--config.start.steps=3", "--config.start.learning_rate=2e-4",
               "--config.start.demonstrations=16", "--config.start.trajectories_per_step=16")
  assert made.returncode == 0, made.stderr[-3000:]
  log = [json.loads(line) for line in (workdir / "start" / "log.jsonl").read_text().splitlines()]
  assert log[0]["demonstrations"] == 16 and 0 < log[0]["correct"] < 1
  assert [row["step"] for row in log[1:]] == [1, 2, 3]
  assert log[3]["log_prob"] > log[1]["log_prob"]  # it imitates


@pytest.mark.parametrize(
  "flags, words",
  [
    (["--config=configs/quickstart.py:tiny", "--config.rl.gama=0.9"], ["gama"]),
    (["--config=configs/no_such.py"], ["no_such.py"]),
    (["--config=configs/quickstart.py:big"], ["tiny"]),
    ([*MICRO, "--config.rl.gamma=1.5"], ["gamma", "1.5"]),
    ([*MICRO, "--config.rl.learning_rate=nan"], ["learning_rate"]),
    ([*MICRO, "--config.world.countries=1"], ["config.world"]),
    ([*MICRO, "--config.start.dir=nowhere"], ["nowhere", "start.rebuild"]),
  ],
  ids=["unknown key", "no such file", "no such form", "gamma", "learning rate", "world",
       "no starting policy"],
)
def test_what_is_the_users_to_fix_is_one_message_without_traceback(tmp_path, flags, words):
  done = train(tmp_path / "run", *flags)
  assert done.returncode != 0
  assert "Traceback" not in done.stderr, done.stderr[-2000:]
  assert all(word in done.stderr for word in words), done.stderr[-2000:]


def test_workdir_that_cannot_be_made_is_one_message(tmp_path):
  (tmp_path / "file").write_text("")
  done = train(tmp_path / "file" / "run", *MICRO)
  assert done.returncode == 2 and "Traceback" not in done.stderr
  assert "workdir" in done.stderr


def test_second_trainer_on_a_workdir_is_refused_and_changes_nothing(tmp_path):
  workdir = tmp_path / "run"
  workdir.mkdir()
  with ReplayBuffer(workdir / "buffer.db"):
    second = train(workdir, *MICRO)
  assert second.returncode == 2 and "another process" in second.stderr
  assert not (workdir / "config.json").exists()


def test_config_can_be_corrected_until_something_was_made_by_it(tmp_path):
  workdir = tmp_path / "run"
  refused = train(workdir, *MICRO, "--config.tasks.heldout=100000")
  assert refused.returncode == 2 and "too small" in refused.stderr
  corrected = train(workdir, *MICRO, "--config.start.dir=nowhere")  # the next thing to be wrong
  assert corrected.returncode == 2 and "nowhere" in corrected.stderr
  bound = train(workdir, *MICRO, "--config.world.cities=300")  # but the world is there
  assert bound.returncode == 2 and "world.cities: 240 → 300" in bound.stderr


def test_gap_beyond_the_bound_stops_the_run_before_anything_is_saved(tmp_path):
  done = train(tmp_path / "run", *MICRO, "--config.rl.max_logprob_gap=1e-12")
  assert done.returncode == 2 and "Traceback" not in done.stderr
  assert "max_logprob_gap" in done.stderr
  assert (tmp_path / "run" / "checkpoints" / "0").is_dir()
  assert not (tmp_path / "run" / "checkpoints" / "1").exists()
