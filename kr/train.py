r"""Trains a research agent end to end, from nothing to a report.

    python -m kr.train --config=configs/quickstart.py --workdir=runs/quickstart

Stages, each resumable: an offline web, tasks over it, a starting policy, an inference
server, evaluation, reinforcement learning, evaluation, report. The same command goes on
where it was stopped, however it was stopped; --config.rl.steps=60 extends a finished run.
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

from absl import flags
from absl import logging
import ml_collections
from ml_collections import config_flags
import numpy as np
import tqdm

from kr import types
from kr import wiring
from kr.data import tasks as tasks_lib
from kr.data import world as world_lib
from kr.data.grade import grade
from kr.eval import report
from kr.eval import runner
from kr.eval import stats
from kr.model import compiled
from kr.model import hf
from kr.model.checkpoint import Checkpoints
from kr.model.config import ModelConfig
from kr.rl import advantage
from kr.rl import batch as batch_lib
from kr.rl import credit
from kr.rl import metrics as metrics_lib
from kr.rl import reward
from kr.rl import rollout
from kr.rl import start
from kr.rl.buffer import ReplayBuffer
from kr.rl.learner import Learner, make_optimizer

ConfigDict = ml_collections.ConfigDict

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The experiment, such as configs/quickstart.py.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where everything of the run is kept.")
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise wiring.UserError(f"kr.train takes flags only, not {' '.join(argv[1:])!r}; see --help")
  logging.set_verbosity(logging.WARNING)
  config = _CONFIG.value
  workdir = wiring.Workdir.create(_WORKDIR.value)
  check_config(config)
  with contextlib.ExitStack() as stack:
    buffer = stack.enter_context(ReplayBuffer(workdir.buffer))  # locked: one trainer a workdir
    adopt_config(workdir, config)
    if finished(workdir, config):
      print(f"{workdir.path} is complete at {config.rl.steps} steps: see {workdir.report}\n"
            f"Extend it with --config.rl.steps={config.rl.steps + 20}.")
      return
    compiled.keep()
    run_stages(config, workdir, buffer, Clock(workdir.path / "minutes.json"), stack)


def run_stages(config: ConfigDict, workdir: wiring.Workdir, buffer: ReplayBuffer, clock: Clock,
               stack: contextlib.ExitStack) -> None:
  """All stages in order; `stack` ends what they start."""
  # ---------------------------------------------------------------- world, tasks
  with clock("world"):
    world = make_world(workdir, config)
  with clock("tasks"):
    train, heldout, guessed = make_tasks(workdir, config, world)

  # ---------------------------------------------------------------- starting policy
  with clock("start"):
    make_start(workdir, config, world, train)
    checkpoints = Checkpoints(workdir.checkpoints, keep=config.rl.keep_checkpoints)
    learner, restored, meta = make_learner(workdir, config, checkpoints)

  # ---------------------------------------------------------------- server, RL, evaluations
  results: dict[str, list[types.Trajectory]] = {}
  with clock("server"):
    session = stack.enter_context(wiring.session(
        config, workdir, pathlib.Path(checkpoints.policy_path(restored)), version=restored))

  async def evaluate(name: str, tag: str) -> None:
    with clock(f"evaluate {name}"):
      results[name] = await runner.evaluate(
          heldout[:config.eval.tasks], config.eval.samples, policy=session.policy,
          toolbox=session.toolbox, chat=session.chat, limits=wiring.limits(config), grade=grade,
          concurrency=config.eval.concurrency, out_path=workdir.eval(name), seed=config.seed,
          tag=tag)

  async def run(policy: Any) -> None:
    await policy.check_on_policy()
    if restored == 0:
      await evaluate("before", "before")
    else:  # what is missing there must not be made up by a policy that has learned since
      order = {task.id: n for n, task in enumerate(heldout)}
      results["before"] = sorted(runner.read(workdir.eval("before")),
                                 key=lambda t: (order[t.task.id], t.sample))
      if not results["before"]:
        say(f"{workdir.eval('before')} is gone: the report will have no column for before")
    with metrics_lib.MetricsWriter(workdir.path, restored) as writer:
      written = {row["step"] for row in metrics_lib.read(workdir.path)}
      if meta.get("metrics") and restored not in written:
        writer.write(restored, meta["metrics"])  # killed between checkpoint and publication
      await reinforce(config, train, learner, restored, checkpoints, session, buffer, writer, clock)
    await evaluate("after", f"after-{config.rl.steps}")

  session.run(run)

  # ---------------------------------------------------------------- report
  before, after = (stats.table(stats.by_task(results[name]), seed=config.seed)
                   for name in ("before", "after"))
  rows = metrics_lib.read(workdir.path)
  summary = report.write_summary(
      workdir.summary, before=before, after=after,
      max_logprob_gap=max((row.get("logprob_gap", 0.0) for row in rows), default=None),
      minutes=clock.minutes, config=wiring.plain(config), commit=wiring.commit(),
      hardware=wiring.hardware(), seed=config.seed, guesser_share=guessed)
  report.write_report(workdir.report, summary, rows, results["before"], results["after"],
                      decode=session.chat.decode)
  print(f"\n{report.format_table(before, after)}\n\n"
        f"A guesser without tools gets {guessed:.1%} of the held-out questions right.\n"
        f"Report: {workdir.report}")


# -------------------------------------------------------------------- reinforcement learning


async def reinforce(config: ConfigDict, train: list[types.Task], learner: Learner, restored: int,
                    checkpoints: Checkpoints, session: wiring.Session, buffer: ReplayBuffer,
                    writer: metrics_lib.MetricsWriter, clock: Clock) -> None:
  """REINFORCE. Step n rolls out under policy n-1, updates it, and publishes policy n."""
  rl = config.rl
  buffer.rewind(restored)  # what was trained after that checkpoint is to be trained again
  with bar("reinforce", rl.steps, "step", restored) as steps:
    def on_progress(_, done: int, total: int) -> None:
      steps.set_postfix_str(f"rollout {done}/{total}", refresh=False)
      steps.update(0)  # draws, if it is time to

    for step in range(restored + 1, rl.steps + 1):
      seconds, watch = {}, Stopwatch()

      # ---- rollout: groups of trajectories, concurrently
      trajectories = await rollout.collect(
          rollout.pick_tasks(train, config.seed, step, rl.tasks_per_step), rl.group_size, step=step,
          seed=config.seed, policy=session.policy, toolbox=session.toolbox, chat=session.chat,
          limits=wiring.limits(config), buffer=buffer, grade=grade,
          concurrency=config.rollout.concurrency, budget_s=config.rollout.budget_s or None,
          on_progress=on_progress)
      if not config.rollout.budget_s:
        rollout.assert_on_policy(trajectories, step - 1)
      seconds["rollout_s"] = watch()

      # ---- reward, advantage, negative sample control, update
      rewards, advantages, keep = credit.assign(
          trajectories, gamma=rl.gamma, format_penalty=rl.format_penalty,
          negatives_keep=rl.negatives_keep, protect_faults=rl.protect_faults,
          seed=[config.seed, step])
      batch = batch_lib.pack(
          list(zip(trajectories, advantages, keep)), rl.row_tokens, rl.micro_rows)
      update = await asyncio.to_thread(learner.update, batch, step - 1)
      check_gap(step, update.get("logprob_gap", 0.0), rl.max_logprob_gap)
      seconds["update_s"] = watch()

      # ---- checkpoint, publish. Rows are consumed first, and rewound if no checkpoint follows.
      row = {**metrics_lib.summarize(trajectories, rewards, buffer.counts(step)["excluded"]),
             **update, **seconds, "discarded": int((~keep).sum()),
             "padding_share": batch.padding_share}
      buffer.consume([t.id for t in trajectories], step)
      save(checkpoints, step, learner, row)
      await session.publish(checkpoints.policy_path(step), step)
      seconds["publish_s"] = watch()

      row |= {"publish_s": seconds["publish_s"],
              "tokens_per_s": sum(len(s) for t in trajectories for s in t.segments)
                              / sum(seconds.values())}
      writer.write(step, row)
      clock.add("reinforce", sum(seconds.values()))
      tqdm.tqdm.write(metrics_lib.console_line(step, row), file=sys.stderr)
      steps.update()


def check_gap(step: int, gap: float, bound: float) -> None:
  """Stops the run if server and learner disagree about the probability of what was sampled."""
  if not gap <= bound:
    raise wiring.UserError(
        f"step {step}: the server's logprobs differ from the learner's by {gap:.2e} on average, "
        f"more than rl.max_logprob_gap={bound:g}. The two do not run the same policy: that is a "
        "bug, not noise. Nothing was saved of this step.")


# -------------------------------------------------------------------- stages before it


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
        "with --config.start.rebuild=True (about 20 minutes)")
  shutil.rmtree(workdir.start, ignore_errors=True)  # what has lost its config is no policy
  with tempfile.TemporaryDirectory(dir=workdir.path) as fresh:
    shutil.copytree(source, pathlib.Path(fresh, "start"))
    os.replace(pathlib.Path(fresh, "start"), workdir.start)


def make_learner(workdir: wiring.Workdir, config: ConfigDict, checkpoints: Checkpoints
                 ) -> tuple[Learner, int, dict[str, Any]]:
  """The learner, its step and meta: the latest checkpoint's, or 0 for the starting policy."""
  rl = config.rl
  params, cfg = hf.load(workdir.start)
  learner = Learner(
      cfg, params, make_optimizer(rl.learning_rate, rl.warmup_steps, rl.clip_norm, rl.weight_decay,
                                  rl.b2), micro_rows=rl.micro_rows)
  latest = checkpoints.latest()
  if latest is None:
    save(checkpoints, 0, learner)
    return learner, 0, {}
  learner.params, learner.opt_state, meta = checkpoints.restore(
      latest, learner.params, learner.opt_state)
  return learner, latest, meta


def save(checkpoints: Checkpoints, step: int, learner: Learner,
         metrics: dict[str, Any] | None = None) -> None:
  """A checkpoint, with the step's metrics in case that the process dies before it writes them."""
  checkpoints.save(step, learner.params, learner.opt_state,
                   {"model": learner.cfg, "tokenizer": "../../start", "metrics": metrics})


# -------------------------------------------------------------------- the run's own state

# What may differ between two starts of one run: its length, and what changes no result.
_FREE = ("rl.steps:", "rl.keep_checkpoints:", "start.rebuild:", "start.dir:", "server.",
         "eval.concurrency:", "rollout.concurrency:")


def check_config(config: ConfigDict) -> None:
  """Refuses values out of range before anything starts."""
  rl = config.rl
  with users_error("config.rl"):
    reward.step_rewards(types.StopReason.ANSWERED, True, 1, rl.gamma, rl.format_penalty)
    advantage.negative_sample_control([], rl.negatives_keep, np.random.default_rng(0))
    if min(rl.tasks_per_step, rl.group_size, rl.micro_rows) < 1:
      raise ValueError("tasks_per_step, group_size and micro_rows must be at least 1")
    if rl.steps < 0 or not rl.learning_rate > 0:
      raise ValueError("steps must not be negative, and learning_rate must be above 0")
    if odd := [k for k, v in rl.items() if isinstance(v, float) and not np.isfinite(v)]:
      raise ValueError(f"{', '.join(odd)} must be finite")
    if rl.keep_checkpoints < 2:
      raise ValueError("keep_checkpoints must be at least 2: the server may still need the last "
                       "policy while the next one is published")


@contextlib.contextmanager
def users_error(where: str) -> Iterator[None]:
  """A ValueError inside is the user's to fix."""
  try:
    yield
  except ValueError as e:
    raise wiring.UserError(f"{where}: {e}") from e


def adopt_config(workdir: wiring.Workdir, config: ConfigDict) -> None:
  """Makes `config` the workdir's, or refuses a workdir of another one and says what differs.

  A key binds from the moment that something was made by it: until then it can be corrected.
  """
  latest = Checkpoints(workdir.checkpoints).latest()
  if workdir.config.is_file():
    saved = workdir.load_config()
    made = {"world": (workdir.world(saved) / "manifest.json").is_file(),
            "tasks": workdir.tasks("train").is_file(), "start": workdir.start.is_dir()}
    differences = [line for line in wiring.config_differences(saved, config)
                   if not line.startswith(_FREE)
                   and made.get(line.split(".")[0], latest is not None)]
    if differences:
      raise wiring.UserError(
          f"{workdir.path} is the workdir of another config; what differs:\n  "
          + "\n  ".join(differences)
          + "\nGive another --workdir, or the config that the run was started with.")
    if config.rl.steps < (latest or 0):
      raise wiring.UserError(f"{workdir.path} is past step {config.rl.steps} already: a run can "
                             "be extended, not shortened. Give another --workdir.")
  workdir.save_config(config)


def finished(workdir: wiring.Workdir, config: ConfigDict) -> bool:
  """Whether the last stage has left its summary for this many steps."""
  summary = read_derived(workdir.summary)
  return (workdir.report.is_file() and bool(summary)
          and summary["config"]["rl"]["steps"] == config.rl.steps)


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


if __name__ == "__main__":
  wiring.main_guard(main)
