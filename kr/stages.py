"""What comes before the RL: an offline web, tasks over it, a starting policy; and their clock.

Each stage makes what is missing in the workdir, and takes what is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
import contextlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
from typing import Any

import ml_collections
import tqdm

from kr import types
from kr import wiring
from kr.data import fewshot
from kr.data import tasks as tasks_lib
from kr.data import world as world_lib
from kr.data.grade import grade
from kr.model.config import ModelConfig
from kr.rl import start

ConfigDict = ml_collections.ConfigDict
_LINK_BYTES = 64 * 2 ** 20  # weights of this size are linked into the workdir, not copied


def make_world(workdir: wiring.Workdir, config: ConfigDict) -> world_lib.World:
  """Builds the offline web and its index, unless they are there."""
  path, w = workdir.world(config), config.world
  if not (path / "manifest.json").is_file():
    if w.dir:
      raise wiring.UserError(f"world.dir={w.dir} holds no world; leave it empty to build one")
    with users_error("config.world"):
      with bar("pages", None, "page") as pages:
        def on_progress(done: int, total: int) -> None:
          pages.total = total
          pages.update(done - pages.n)

        world_lib.build(path, w.seed, countries=w.countries, cities=w.cities, elements=w.elements,
                        on_progress=on_progress)
  with users_error(str(path)):
    world = world_lib.World(path)
  say(f"{world.manifest['pages']} pages, {world.manifest['links']} links: {path}")
  return world


def make_tasks(workdir: wiring.Workdir, config: ConfigDict, world: world_lib.World
               ) -> tuple[list[types.Task], list[types.Task], float]:
  """Train tasks, held-out tasks, and the share of the latter that a guesser gets right."""
  t = config.tasks
  have = [name for name in ("train", "heldout") if workdir.tasks(name).is_file()]
  if len(have) == 1:
    raise wiring.UserError(f"{workdir.tasks(have[0])} is alone: give both train.jsonl and "
                           "heldout.jsonl, or neither to have them made")
  if not have:
    with users_error("config.tasks"), bar("tasks", t.train + t.heldout, "task") as made:
      train, heldout = tasks_lib.make(
          world, t.seed, t.train, t.heldout, t.mix.to_dict(), made.update)
    with tempfile.TemporaryDirectory(dir=workdir.path) as fresh:  # both appear, or none
      tasks_lib.save(train, pathlib.Path(fresh, "tasks", "train.jsonl"))
      tasks_lib.save(heldout, pathlib.Path(fresh, "tasks", "heldout.jsonl"))
      os.replace(pathlib.Path(fresh, "tasks"), workdir.tasks("train").parent)
  train, heldout = workdir.load_tasks("train"), workdir.load_tasks("heldout")
  for task in (*train, *heldout):
    with users_error(f"task {task.id}"):
      if not grade(task, task.answer):
        raise ValueError(f"its own answer {task.answer!r} is graded wrong: check answer_type")
  guessed = tasks_lib.guesser_share(train, heldout)
  say(f"{len(train)} train and {len(heldout)} held-out tasks; "
      f"a guesser without tools gets {guessed:.1%} of the latter right")
  return train, heldout, guessed


def make_start(workdir: wiring.Workdir, config: ConfigDict, world: world_lib.World,
               train: Sequence[types.Task]) -> None:
  """Puts the starting policy into the workdir: the one that ships, or one made now."""
  if (workdir.start / "config.json").is_file():
    return say(f"the starting policy is there already: {workdir.start}")
  source, s = pathlib.Path(config.start.dir), config.start
  if s.rebuild:
    source = workdir.path / "start-made"
  if s.rebuild and not (source / "log.jsonl").is_file():  # written last
    toolbox = wiring.build_toolbox(config, workdir)
    start.build(
        world, train, toolbox, source, system=config.agent.system, declare=config.agent.declare,
        limits=wiring.limits(config), lines=config.tools.lines, demonstrations=s.demonstrations,
        cfg=ModelConfig(vocab=s.vocab, width=s.width, layers=s.layers, heads=s.heads,
                        kv_heads=s.heads, head_dim=s.head_dim, mlp=s.mlp, rope_theta=s.rope_theta,
                        max_len=config.server.max_len),
        steps=s.steps, trajectories_per_step=s.trajectories_per_step,
        learning_rate=s.learning_rate, row_tokens=config.rl.row_tokens,
        micro_rows=config.rl.micro_rows, seed=s.seed)
  if not (source / "config.json").is_file():
    raise wiring.UserError(
        f"start.dir={s.dir} holds no starting policy: run from the repository's root, or make one "
        f"with {s.get('command', '--config.start.rebuild=True (about 20 minutes)')}")
  shutil.rmtree(workdir.start, ignore_errors=True)  # what has lost its config is no policy
  with tempfile.TemporaryDirectory(dir=workdir.path) as fresh:
    shutil.copytree(source, pathlib.Path(fresh, "start"), copy_function=_link_or_copy)
    os.replace(pathlib.Path(fresh, "start"), workdir.start)


def make_examples(workdir: wiring.Workdir, config: ConfigDict, train: Sequence[types.Task]
                  ) -> list[types.Task]:
  """Records the first prompt's examples, unless they are there; the tasks that remain to train."""
  count, openings = config.agent.get("examples", 0), config.agent.get("openings", 0)
  if not count:
    return list(train)
  with users_error("config.agent.examples"):
    if not workdir.examples.is_file() or len(fewshot.load(workdir.examples)) != count + openings:
      bare = config.copy_and_resolve_references()
      bare.agent.examples = 0
      toolbox = wiring.build_toolbox(bare, workdir)
      chat = wiring.build_chat(bare, workdir, toolbox)

      async def record() -> list[types.Trajectory]:
        try:
          return await fewshot.record(train, count, openings, chat=chat, toolbox=toolbox,
                                      limits=wiring.limits(bare))
        finally:
          await toolbox.aclose()

      fewshot.save(asyncio.run(record()), workdir.examples)
    shown = {t.task.id for t in fewshot.load(workdir.examples)}  # their answers are in the prompt
  return [task for task in train if task.id not in shown]


def _link_or_copy(source: str, target: str) -> None:
  """A large file becomes a second name of the same bytes, where the file system can do that."""
  if os.path.getsize(source) >= _LINK_BYTES:
    try:
      return os.link(os.path.realpath(source), target)  # a hub's snapshot is symbolic links
    except OSError:  # another file system, or no permission
      pass
  shutil.copy2(source, target)


# -------------------------------------------------------------------- errors, time, progress


@contextlib.contextmanager
def users_error(where: str) -> Iterator[None]:
  """A ValueError inside is the user's to fix."""
  try:
    yield
  except ValueError as e:
    raise wiring.UserError(f"{where}: {e}") from e


def read_derived(path: pathlib.Path) -> dict[str, Any]:
  """A JSON file that the run can make again: what is missing or damaged is empty."""
  try:
    return dict(json.loads(path.read_text()))
  except (FileNotFoundError, ValueError, TypeError):
    return {}


class Clock:
  """Minutes spent in each stage, added up over restarts and kept in a file."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    self.minutes: dict[str, float] = read_derived(path)

  @contextlib.contextmanager
  def __call__(self, stage: str) -> Iterator[None]:
    say(f"== {stage}")
    watch = Stopwatch()
    try:
      yield
    finally:
      self.add(stage, watch())

  def add(self, stage: str, seconds: float) -> None:
    self.minutes[stage] = round(self.minutes.get(stage, 0.0) + seconds / 60, 4)
    wiring.write_json(self._path, self.minutes)


class Stopwatch:
  """Seconds since it was made or last called."""

  def __init__(self):
    self._since = time.monotonic()

  def __call__(self) -> float:
    now = time.monotonic()
    elapsed, self._since = now - self._since, now
    return elapsed


def bar(what: str, total: int | None, unit: str, done: int = 0) -> tqdm.tqdm:
  """A progress bar on stderr; once half a minute where that is a file."""
  return tqdm.tqdm(total=total, initial=done, desc=what, unit=unit, file=sys.stderr,
                   mininterval=0.2 if sys.stderr.isatty() else 30.0)


def say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
