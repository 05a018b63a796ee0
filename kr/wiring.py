"""What the binaries share: a run's directory, and the parts that its config describes.

`Workdir` knows where everything of a run lies. The builders read the config once and hand
named values to the rooms. `main_guard` turns what is the user's to fix into one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import errno
import json
import os
import pathlib
import platform
import sqlite3
import subprocess
import sys
import tempfile
from typing import Any

from absl import app
from absl import flags
import ml_collections

from kr.agent import loop
from kr.agent.chat import Chat
from kr.data import fewshot
from kr.data import tasks as tasks_lib
from kr.data.world import World
from kr.eval.page import write_text
from kr.tools.base import Toolbox
from kr.tools.browser import Browser
from kr.tools.python import Python
from kr.tools.search import Search
from kr.types import Task

ConfigDict = ml_collections.ConfigDict


_SECTIONS = ("world", "agent", "tools", "server", "rollout", "rl", "eval")  # of every config


class UserError(ValueError):
  """Something that the user can fix; the text says what and how."""


class Workdir:
  """The directory of one run: where each thing lies, and how it is read and written."""

  def __init__(self, path: str | os.PathLike):
    self.path = pathlib.Path(path)
    self.config = self.path / "config.json"
    self.start = self.path / "start"
    self.checkpoints = self.path / "checkpoints"
    self.buffer = self.path / "buffer.db"
    self.examples = self.path / "examples.jsonl"
    self.summary = self.path / "summary.json"
    self.report = self.path / "report.html"
    self.server_log = self.path / "server.log"

  @classmethod
  def create(cls, path: str | os.PathLike) -> "Workdir":
    """The workdir at `path`, made if it is missing. Raises UserError if it is not writable."""
    workdir = cls(path)
    try:
      workdir.path.mkdir(parents=True, exist_ok=True)
      with tempfile.TemporaryFile(dir=workdir.path):
        pass
    except OSError as e:
      raise UserError(f"cannot write to the workdir {path}: {e.strerror}; "
                      "give another --workdir or change its permissions") from e
    return workdir

  @classmethod
  def open(cls, path: str | os.PathLike) -> tuple["Workdir", ConfigDict]:
    """An existing workdir and its config. Raises UserError where either is missing or broken."""
    workdir = cls(path)
    if not workdir.path.is_dir():
      raise UserError(f"there is no workdir {path}; train one first: "
                      "bash launch/quickstart.sh, or python -m kr.train --config=… --workdir=…")
    if not workdir.config.is_file():
      raise UserError(f"{path} holds no config.json, so it is not the workdir of a run; "
                      "train there first, or give the --workdir of a run")
    config = workdir.load_config()
    if missing := [name for name in _SECTIONS if name not in config]:
      raise UserError(f"{workdir.config} lacks {', '.join(missing)}; train in a new --workdir")
    return workdir, config

  def load_config(self) -> ConfigDict:
    try:
      return ConfigDict(json.loads(self.config.read_text()))
    except (ValueError, TypeError, AttributeError) as e:
      raise UserError(f"{self.config} is not a config ({e}); train in a new --workdir") from e

  def save_config(self, config: ConfigDict) -> None:
    write_json(self.config, plain(config))

  def world(self, config: ConfigDict) -> pathlib.Path:
    """The world's directory: the config's `world.dir` if it names one, else the run's own."""
    other = config.get("world", {}).get("dir")
    return pathlib.Path(other) if other else self.path / "world"

  def tasks(self, split: str) -> pathlib.Path:
    return self.path / "tasks" / f"{split}.jsonl"

  def load_tasks(self, split: str) -> list[Task]:
    """The tasks of a split, in their order. Raises UserError if there are none."""
    path = self.tasks(split)
    if not path.is_file() or path.parent != self.tasks("train").parent:
      have = sorted(p.stem for p in path.parent.glob("*.jsonl"))
      raise UserError(f"{path} does not exist; " + (
          f"this run has the splits {', '.join(have)}" if have else
          "the run has not made its tasks yet: train it first"))
    try:
      tasks = tasks_lib.load(path)
    except ValueError as e:
      raise UserError(f"{e}; mend that line, or remove {path.parent} to have tasks made") from e
    if not tasks:
      raise UserError(f"{path} holds no task; remove {path.parent} to have tasks made")
    return tasks

  def eval(self, name: str) -> pathlib.Path:
    return self.path / "eval" / f"{name}.jsonl"

  def policy(self, step: str | int) -> tuple[pathlib.Path, str]:
    """The policy checkpoint for "start", "latest" or a step, and the step's name.

    Raises UserError if it does not exist.
    """
    if step == "start":
      if not self.start.is_dir():
        raise UserError(f"{self.path} has no starting policy yet: train it first")
      return self.start, "start"
    steps: list[int] = []
    if self.checkpoints.is_dir():  # as Checkpoints.steps has it, without waiting for jax
      steps = sorted(int(p.name) for p in self.checkpoints.iterdir() if p.name.isdecimal())
    if not steps:
      raise UserError(f"{self.path} has no checkpoint yet: train it first "
                      "(or use --step=start for the starting policy)")
    try:
      wanted = steps[-1] if step == "latest" else int(step)
    except ValueError:
      raise UserError(f"--step={step}: give latest, start or a number") from None
    if wanted not in steps:
      raise UserError(f"{self.path} keeps no checkpoint of step {wanted}; it keeps "
                      f"{', '.join(map(str, steps))}")
    return self.checkpoints / str(wanted), f"step{wanted}"


# --------------------------------------------------------------------------- parts of a run


def build_toolbox(config: ConfigDict, workdir: Workdir) -> Toolbox:
  """The tools over the run's world. Raises UserError if the world is missing or broken."""
  tools = config.tools
  try:
    world = World(workdir.world(config))
    search = Search(world.index_path, top_k=tools.top_k, snippet_words=tools.snippet_words)
  except ValueError as e:
    raise UserError(str(e)) from e
  browser = Browser(world.store, search, lines=tools.lines, max_chars=tools.max_chars)
  python = Python(wall_s=tools.python_wall_s, max_chars=tools.max_chars)
  return Toolbox([search, *browser.tools(), python])


def build_chat(config: ConfigDict, workdir: Workdir, toolbox: Toolbox) -> Chat:
  """The chat of the run's tokenizer, which declares the toolbox's tools and shows the examples."""
  agent = config.agent
  try:
    examples = fewshot.load(workdir.examples) if agent.get("examples") else []
    return Chat(workdir.start, toolbox.specs, agent.system, declare=agent.declare,
                max_calls=agent.max_calls, examples=examples)
  except ValueError as e:
    raise UserError(str(e)) from e


def limits(config: ConfigDict) -> loop.Limits:
  """The bounds of a rollout. Raises UserError where they, the server's and the rows' clash."""
  agent = config.agent
  for key, room in (("server.max_len", config.server.max_len),
                    ("rl.row_tokens", config.rl.row_tokens)):
    if room < agent.max_context_tokens:  # the policy would pay for it with format faults
      raise UserError(f"{key}={room} is less than agent.max_context_tokens="
                      f"{agent.max_context_tokens}: raise the first or lower the second")
  try:
    return loop.Limits(
        max_turns=agent.max_turns, max_context_tokens=agent.max_context_tokens,
        max_turn_tokens=agent.max_turn_tokens, max_calls=agent.max_calls)
  except ValueError as e:
    raise UserError(f"agent.{e}") from e


# ------------------------------------------------------------------------------------ files


def plain(config: ConfigDict | Mapping[str, Any]) -> dict[str, Any]:
  """The config as what JSON gives back: dicts, lists, strings, numbers, None."""
  data = config.to_dict() if isinstance(config, ConfigDict) else dict(config)
  return json.loads(json.dumps(data))


def config_differences(saved: ConfigDict, given: ConfigDict) -> list[str]:
  """One line per key whose value differs: `key: saved → given`, keys sorted."""
  a, b = _flat(plain(saved)), _flat(plain(given))
  return [f"{key}: {a.get(key, '(none)')!r} → {b.get(key, '(none)')!r}"
          for key in sorted({*a, *b}) if (key in a, a.get(key)) != (key in b, b.get(key))]


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  flat: dict[str, Any] = {}
  for key, value in data.items():
    if isinstance(value, dict) and value:
      flat.update(_flat(value, f"{prefix}{key}."))
    else:
      flat[prefix + key] = value
  return flat


def write_json(path: str | os.PathLike, data: Any) -> None:
  """Writes JSON so that a reader sees the old file or the new one, never a half."""
  write_text(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def commit() -> str:
  """The commit of the code that runs ("+" appended if files differ from it), or "unknown"."""
  root = pathlib.Path(__file__).resolve().parent.parent

  def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True,
                          timeout=10, check=True).stdout.strip()
  try:
    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
  except (OSError, subprocess.SubprocessError):
    return "unknown"


def hardware() -> dict[str, Any]:
  """What the numbers were measured on: processor, usable cores, memory in GiB, Python."""
  model = platform.processor() or platform.machine()
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = next((l.split(":", 1)[1].strip() for l in lines if l.startswith("model name")), model)
  except OSError:
    pass
  memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
  return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory, 1),
          "python": platform.python_version()}


# ----------------------------------------------------------------------------------- errors

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)


def explain(error: BaseException) -> str | None:
  """One line for an error that is the user's to fix, or None for any other (a bug)."""
  if type(error).__module__.split(".")[0] == "kr" or isinstance(error, UserError):
    return str(error)  # kr's own exceptions say what to do
  if isinstance(error, OSError) and error.errno in _DISK_FULL:
    return (f"the disk is full ({error.filename or 'while writing'}): free some space and give "
            "the same command again, it goes on from what is saved")
  if isinstance(error, OSError) and error.errno in _NO_ACCESS and error.filename:
    return f"no permission for {error.filename}: {error.strerror}"
  if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
    return ("the disk is full (while writing a database): free some space and give the same "
            "command again, it goes on from what is saved")
  return None


def main_guard(main: Callable[[list[str]], Any]) -> None:
  """`app.run(main)`, but a user's mistake ends in one line and exit status 2, not a traceback.

  Covers the flags too: an unknown --config key, a config file that does not exist. Ctrl-C
  ends with exit status 130. Every other exception passes, with its traceback.
  """
  try:
    app.run(main, flags_parser=_parse_flags)
  except KeyboardInterrupt:
    print("\ninterrupted", file=sys.stderr)
    sys.exit(130)
  except Exception as e:  # pylint: disable=broad-except
    text = explain(e)
    if text is None:
      raise
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


def _parse_flags(argv: list[str]) -> list[str]:
  try:
    rest = flags.FLAGS(argv)
  except flags.Error as e:
    # A config's own complaint comes with its traceback in the text: the last line tells.
    raise UserError(f"{str(e).strip().splitlines()[-1]} (--help lists the flags)") from e
  except (AttributeError, KeyError) as e:
    key = str(e.args[0] if e.args else e).splitlines()[0].strip("\"'")
    raise UserError(f"the config has no key {key}: the --config file lists its keys") from e
  for name in flags.FLAGS:
    error = getattr(flags.FLAGS[name].value, "__dict__", {}).get("_error")
    if isinstance(error, OSError):  # what config_flags keeps instead of a config
      where = flags.FLAGS[name].config_filename
      raise UserError(f"--{name}={where}: there is no such config file") from error
  return rest
