"""What the binaries share: workdirs, atomic files, config differences, clear errors."""

import errno
import json
import os
import pathlib
import sqlite3
import subprocess
import sys

import ml_collections
import pytest

from kr import serving
from kr import wiring
from kr.model.checkpoint import Checkpoints
from kr.types import Task

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_a_config_survives_the_workdir(tmp_path):
  config = ml_collections.ConfigDict(
      {"seed": 3, "agent": {"system": "Ärger", "rate": 1e-4}, "mix": (1, 2), "none": None,
       **{name: {} for name in ("world", "tools", "server", "rollout", "rl", "eval")}})
  workdir = wiring.Workdir.create(tmp_path / "runs" / "a")
  workdir.save_config(config)
  opened, loaded = wiring.Workdir.open(tmp_path / "runs" / "a")
  assert opened.path == workdir.path
  assert loaded.agent.system == "Ärger" and loaded.agent.rate == 1e-4 and loaded.mix == [1, 2]
  assert wiring.config_differences(loaded, config) == []


def test_a_config_without_its_sections_is_refused_by_their_names(tmp_path):
  workdir = wiring.Workdir.create(tmp_path)
  workdir.save_config(ml_collections.ConfigDict({"seed": 0}))
  with pytest.raises(wiring.UserError, match="lacks world, agent"):
    wiring.Workdir.open(tmp_path)


def test_differing_configs_are_told_apart_key_by_key():
  a = ml_collections.ConfigDict({"seed": 0, "rl": {"steps": 40, "gamma": 0.9}, "gone": {"x": 1}})
  b = ml_collections.ConfigDict({"seed": 0, "rl": {"steps": 60, "gamma": 0.9, "new": None}})
  assert wiring.config_differences(a, b) == [
      "gone.x: 1 → '(none)'", "rl.new: '(none)' → None", "rl.steps: 40 → 60"]


@pytest.mark.parametrize("prepare, text", [
    (lambda p: None, "there is no workdir"),
    (lambda p: p.mkdir(), "holds no config.json"),
    (lambda p: (p.mkdir(), (p / "config.json").write_text("{torn")), "is not a config"),
    (lambda p: (p.mkdir(), (p / "config.json").write_text("[1]")), "is not a config"),
    (lambda p: p.write_text("a file"), "there is no workdir"),
])
def test_a_wrong_workdir_is_named_with_what_to_do(tmp_path, prepare, text):
  prepare(tmp_path / "w")
  with pytest.raises(wiring.UserError, match=text):
    wiring.Workdir.open(tmp_path / "w")


def test_a_workdir_that_cannot_be_made_is_named(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(wiring.UserError, match="cannot write to the workdir .*another --workdir"):
    wiring.Workdir.create(tmp_path / "file" / "w")


def test_tasks_are_read_in_order_and_a_missing_split_names_those_that_exist(tmp_path):
  workdir = wiring.Workdir(tmp_path)
  with pytest.raises(wiring.UserError, match="has not made its tasks yet"):
    workdir.load_tasks("heldout")
  tasks = [Task(f"t{i}", "q", "a", "k", aliases=("b",)) for i in range(3)]
  workdir.tasks("heldout").parent.mkdir()
  workdir.tasks("heldout").write_text("".join(json.dumps(t.to_json()) + "\n" for t in tasks))
  assert workdir.load_tasks("heldout") == tasks
  with pytest.raises(wiring.UserError, match="has the splits heldout"):
    workdir.load_tasks("test")


def test_a_line_that_is_no_task_is_named(tmp_path):
  workdir = wiring.Workdir(tmp_path)
  workdir.tasks("train").parent.mkdir()
  good = json.dumps(Task("t", "q", "b", "k").to_json())
  workdir.tasks("train").write_text(good + "\n" + good[:-9] + "\n")
  with pytest.raises(wiring.UserError, match="train.jsonl, line 2: not a task"):
    workdir.load_tasks("train")


@pytest.mark.parametrize("change, text", [
    ({}, None),
    ({"server.max_len": 99}, "server.max_len=99 is less than agent.max_context_tokens=100"),
    ({"rl.row_tokens": 64}, "rl.row_tokens=64 is less than agent.max_context_tokens=100"),
    ({"agent.max_turns": 0}, "agent.max_turns must be at least 1, not 0"),
])
def test_lengths_that_clash_are_refused_before_anything_starts(tmp_path, change, text):
  config = ml_collections.ConfigDict({
      "agent": {"max_turns": 8, "max_context_tokens": 100, "max_turn_tokens": 50, "max_calls": 2},
      "server": {"max_len": 100}, "rl": {"row_tokens": 100}})
  config.update_from_flattened_dict(change)
  if text is None:
    assert wiring.limits(config).max_context_tokens == 100
    return
  with pytest.raises(wiring.UserError, match=text):
    with serving.session(config, wiring.Workdir(tmp_path), tmp_path):
      pass


@pytest.mark.parametrize("step, have, text", [
    ("latest", [], "no checkpoint yet"), ("start", [], "no starting policy yet"),
    ("newest", [4], "give latest, start or a number"), ("3", [4, 8], "it keeps 4, 8")])
def test_a_policy_that_does_not_exist_is_named(tmp_path, step, have, text):
  for i in have:
    (tmp_path / "checkpoints" / str(i)).mkdir(parents=True)
  with pytest.raises(wiring.UserError, match=text):
    wiring.Workdir(tmp_path).policy(step)


def test_policies_are_found_by_name_and_step_as_the_checkpoints_have_them(tmp_path):
  for name in ("start", "checkpoints/4", "checkpoints/12", "checkpoints/16.removed"):
    (tmp_path / name).mkdir(parents=True)
  workdir = wiring.Workdir(tmp_path)
  assert workdir.policy("start") == (tmp_path / "start", "start")
  assert workdir.policy("latest") == (tmp_path / "checkpoints" / "12", "step12")
  assert workdir.policy(4) == (tmp_path / "checkpoints" / "4", "step4")
  checkpoints = Checkpoints(tmp_path / "checkpoints")
  assert str(workdir.policy("latest")[0]) == checkpoints.policy_path(checkpoints.latest())


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
  path = tmp_path / "deep" / "a.json"
  wiring.write_json(path, {"a": 1})
  with pytest.raises(ValueError):
    wiring.write_json(path, {"a": float("nan")})
  with pytest.raises(UnicodeEncodeError):
    wiring.write_json(path, {"a": "\ud800"})
  assert json.loads(path.read_text()) == {"a": 1}
  assert [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_the_users_errors_are_explained_and_bugs_are_not():
  full = OSError(errno.ENOSPC, "No space left on device", "/w/x")
  assert "the disk is full (/w/x)" in wiring.explain(full)
  assert "no permission for /w/x" in wiring.explain(PermissionError(errno.EACCES, "denied", "/w/x"))
  full = sqlite3.OperationalError("database or disk is full")  # of the world's pages
  assert "the disk is full" in wiring.explain(full)
  assert wiring.explain(wiring.UserError("do this")) == "do this"
  from kr.eval.runner import EvaluationStopped
  assert wiring.explain(EvaluationStopped("go on")) == "go on"
  for bug in (ValueError("shape"), KeyError("x"), FileNotFoundError(errno.ENOENT, "no", "/x")):
    assert wiring.explain(bug) is None


# Name: the body of a binary's main, its flags, and the exit status and text that are promised.
CASES = {
    "clear error": ("raise wiring.UserError('choose another port')", (), 2,
                    "error: choose another port"),
    "Ctrl-C": ("raise KeyboardInterrupt", (), 130, "interrupted"),
    "unknown key": ("pass", ("--config=config.py", "--config.rl.step=3"), 2,
                    "the config has no key"),
    "missing file": ("pass", ("--config=nothing.py",), 2,
                     "--config=nothing.py: there is no such config file"),
    "unknown form": ("pass", ("--config=config.py:huge",), 2, "it has no form 'huge'"),
    "wrong type": ("pass", ("--config=config.py", "--config.seed=x"), 2,
                   "invalid literal for int"),
    "unknown flag": ("pass", ("--confgi=config.py",), 2, "Unknown command line flag 'confgi'"),
    "bug": ("raise ValueError('a bug')", (), 1, "ValueError: a bug"),
    "good": ("print(CONFIG.value.rl.steps)", ("--config=config.py", "--config.rl.steps=7"), 0,
             "7"),
}
CONFIG = """
import ml_collections
def get_config(arg=""):
  if arg:
    raise ValueError(f"it has no form {arg!r}")
  return ml_collections.ConfigDict({"seed": 1, "rl": {"steps": 2}})
"""
# Forks for each case, so that the imports are paid once.
BINARIES = """
import json, os, sys
from ml_collections import config_flags
from kr import wiring
CONFIG = config_flags.DEFINE_config_file("config")
for name, (body, arguments, *_) in json.load(open("cases.json")).items():
  if not os.fork():
    out = os.open(f"{name}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1), os.dup2(out, 2)
    sys.argv = ["binary", *arguments]
    wiring.main_guard(lambda argv: exec(body))
    sys.exit(0)
  print(name, os.waitstatus_to_exitcode(os.wait()[1]), sep=":", flush=True)
"""


@pytest.fixture(scope="module")
def binaries(tmp_path_factory):
  """Runs CASES, each in its own process: {name: (exit status, what it printed)}."""
  path = tmp_path_factory.mktemp("binaries")
  (path / "config.py").write_text(CONFIG)
  (path / "cases.json").write_text(json.dumps(CASES))
  done = subprocess.run([sys.executable, "-c", BINARIES], cwd=path, capture_output=True, text=True,
                        timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
  return {name: (int(code), (path / f"{name}.txt").read_text())
          for name, code in (line.split(":") for line in done.stdout.splitlines())}


@pytest.mark.parametrize("name", CASES)
def test_a_users_mistake_ends_in_one_line_and_a_bug_keeps_its_traceback(binaries, name):
  *_, status, text = CASES[name]
  code, printed = binaries[name]
  assert code == status and text in printed, printed
  if name == "bug":
    assert "Traceback" in printed
  else:
    assert len(printed.strip().splitlines()) == 1
