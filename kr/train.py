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
from kr.model import hf
from kr.model.checkpoint import Checkpoints
from kr.model.config import ModelConfig
from kr.rl import advantage
from kr.rl import batch as batch_lib
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
  adopt_config(workdir, config)
  if finished(workdir, config):
    print(f"{workdir.path} is complete at {config.rl.steps} steps: see {workdir.report}\n"
          f"Extend it with --config.rl.steps={config.rl.steps + 20}.")
    return
  clock = Clock(workdir.path / "minutes.json")

  # ---------------------------------------------------------------- world, tasks
  with clock("world"):
    world = make_world(workdir, config)
  with clock("tasks"):
    train, heldout, guessed = make_tasks(workdir, config, world)

  # ---------------------------------------------------------------- starting policy
  with clock("start"):
    make_start(workdir, config, world, train)
    checkpoints = Checkpoints(workdir.checkpoints, keep=config.rl.keep_checkpoints)
    learner, restored = make_learner(workdir, config, checkpoints)

  # ---------------------------------------------------------------- server, RL, evaluations
  results: dict[str, list[types.Trajectory]] = {}
  with contextlib.ExitStack() as stack:
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
      await evaluate("before", "before")  # complete already if a checkpoint was restored
      with clock("reinforce"):
        await reinforce(workdir, config, train, learner, restored, checkpoints, session)
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


async def reinforce(workdir: wiring.Workdir, config: ConfigDict, train: list[types.Task],
                    learner: Learner, restored: int, checkpoints: Checkpoints,
                    session: wiring.Session) -> None:
  """REINFORCE. Step n rolls out under policy n-1, updates it, and publishes policy n."""
  rl = config.rl
  with ReplayBuffer(workdir.buffer) as buffer, \
      metrics_lib.MetricsWriter(workdir.path, restored) as writer, \
      tqdm.tqdm(total=rl.steps, initial=restored, desc="reinforce", unit="step") as bar:
    buffer.rewind(restored)  # what was trained after that checkpoint is to be trained again
    for step in range(restored + 1, rl.steps + 1):
      seconds, watch = {}, Stopwatch()

      # ---- rollout: groups of trajectories, concurrently
      trajectories = await rollout.collect(
          pick_tasks(train, config.seed, step, rl.tasks_per_step), rl.group_size, step=step,
          seed=config.seed, policy=session.policy, toolbox=session.toolbox, chat=session.chat,
          limits=wiring.limits(config), buffer=buffer, grade=grade,
          concurrency=config.rollout.concurrency, budget_s=config.rollout.budget_s or None,
          on_progress=lambda _, done, total: bar.set_postfix_str(f"rollout {done}/{total}"))
      if not config.rollout.budget_s:
        assert_on_policy(trajectories, step - 1)
      seconds["rollout_s"] = watch()

      # ---- reward, advantage, negative sample control, update
      rewards, advantages, keep = credit(trajectories, rl, [config.seed, step])
      batch = batch_lib.pack(
          list(zip(trajectories, advantages, keep)), rl.row_tokens, rl.micro_rows)
      update = await asyncio.to_thread(learner.update, batch)
      check_gap(step, update.get("logprob_gap", 0.0), rl.max_logprob_gap)
      seconds["update_s"] = watch()

      # ---- checkpoint, publish. Rows are consumed first, and rewound if no checkpoint follows.
      buffer.consume([t.id for t in trajectories], step)
      save(checkpoints, step, learner)
      await session.publish(checkpoints.policy_path(step), step)
      seconds["publish_s"] = watch()

      row = {
          **metrics_lib.summarize(trajectories, rewards, buffer.counts(step)["excluded"]),
          **update, **seconds, "discarded": int((~keep).sum()),
          "padding_share": batch.padding_share,
          "tokens_per_s": sum(len(s) for t in trajectories for s in t.segments)
                          / sum(seconds.values())}
      writer.write(step, row)
      tqdm.tqdm.write(console_line(step, row), file=sys.stderr)
      bar.update()


def credit(trajectories: Sequence[types.Trajectory], rl: ConfigDict, seed: Sequence[int]
           ) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
  """Per trajectory: step rewards [T], step advantages [T], and whether it trains (bool)."""
  rewards = {t.id: reward.step_rewards(t.stop, t.correct, len(t.turns), rl.gamma, rl.format_penalty)
             for t in trajectories}
  advantages: dict[str, np.ndarray] = {}
  for group in rollout.by_group(trajectories):
    advantages.update(zip([t.id for t in group],
                          advantage.step_advantages([rewards[t.id] for t in group])))
  keep = advantage.negative_sample_control(
      [advantages[t.id] for t in trajectories], rl.negatives_keep, np.random.default_rng(seed),
      protected=[rl.protect_faults and t.stop in types.FORMAT_FAULTS for t in trajectories])
  return ([rewards[t.id] for t in trajectories], [advantages[t.id] for t in trajectories], keep)


def pick_tasks(train: Sequence[types.Task], seed: int, step: int, count: int) -> list[types.Task]:
  """The tasks of a step: a walk through seeded permutations, the same after every restart."""
  chosen = []
  for number in range((step - 1) * count, step * count):
    epoch, at = divmod(number, len(train))
    chosen.append(train[np.random.default_rng([seed, epoch]).permutation(len(train))[at]])
  return list({task.id: task for task in chosen}.values())  # a step may span two epochs


def assert_on_policy(trajectories: Sequence[types.Trajectory], version: int) -> None:
  """Checks that the policy which is updated sampled every token itself."""
  for t in trajectories:
    for segment in t.segments:
      if odd := {v for v, m in zip(segment.versions, segment.mask) if m} - {version}:
        raise AssertionError(f"trajectory {t.id} holds tokens of policy {sorted(odd)} in a step "
                             f"that updates policy {version}")


def check_gap(step: int, gap: float, bound: float) -> None:
  """Stops the run if server and learner disagree about the probability of what was sampled."""
  if not gap <= bound:
    raise wiring.UserError(
        f"step {step}: the server's logprobs differ from the learner's by {gap:.2e} on average, "
        f"more than rl.max_logprob_gap={bound:g}. The two do not run the same policy: that is a "
        "bug, not noise. Nothing was saved of this step.")


def console_line(step: int, m: dict[str, Any]) -> str:
  """What a step did, in one line."""
  return (f"step {step:3d}  reward {m['reward']:+.3f}  pass {m['pass_rate']:.2f}  "
          f"faults {m['format_fault_rate']:.2f}  turns {m['turns']:.2f}  "
          f"entropy {m.get('entropy', 0.0):.3f}  gap {m.get('logprob_gap', 0.0):.0e}  "
          f"{m['tokens_per_s']:.0f} tok/s  rollout {m['rollout_s']:.1f} s "
          f"(tools {m['tools_s']:.1f})  update {m['update_s']:.1f} s  "
          f"publish {m['publish_s']:.1f} s")


# -------------------------------------------------------------------- stages before it


def make_world(workdir: wiring.Workdir, config: ConfigDict) -> world_lib.World:
  """Builds the offline web and its index, unless they are there."""
  path, w = workdir.world(config), config.world
  if not (path / "manifest.json").is_file():
    if w.dir:
      raise wiring.UserError(f"world.dir={w.dir} holds no world; leave it empty to build one")
    world_lib.build(path, w.seed, countries=w.countries, cities=w.cities, elements=w.elements)
  world = world_lib.World(path)
  say(f"{world.manifest['pages']} pages, {world.manifest['links']} links: {path}")
  return world


def make_tasks(workdir: wiring.Workdir, config: ConfigDict, world: world_lib.World
               ) -> tuple[list[types.Task], list[types.Task], float]:
  """Train tasks, held-out tasks, and the share of the latter that a guesser gets right."""
  t = config.tasks
  if not workdir.tasks("heldout").is_file():  # written last
    train, heldout = tasks_lib.make(world, t.seed, t.train, t.heldout, t.mix.to_dict())
    tasks_lib.save(train, workdir.tasks("train"))
    tasks_lib.save(heldout, workdir.tasks("heldout"))
  train, heldout = workdir.load_tasks("train"), workdir.load_tasks("heldout")
  guessed = tasks_lib.guesser_share(train, heldout)
  say(f"{len(train)} train and {len(heldout)} held-out tasks; "
      f"a guesser without tools gets {guessed:.1%} of the latter right")
  return train, heldout, guessed


def make_start(workdir: wiring.Workdir, config: ConfigDict, world: world_lib.World,
               train: Sequence[types.Task]) -> None:
  """Puts the starting policy into the workdir: the one that ships, or one made now."""
  if (workdir.start / "config.json").is_file():
    return
  source, s = pathlib.Path(config.start.dir), config.start
  if s.rebuild:
    toolbox = wiring.build_toolbox(config, workdir)
    source = workdir.path / "start-made"
    start.build(
        world, train, toolbox, source, system=config.agent.system, declare=config.agent.declare,
        limits=wiring.limits(config), lines=config.tools.lines, demonstrations=s.demonstrations,
        cfg=ModelConfig(vocab=s.vocab, width=s.width, layers=s.layers, heads=s.heads,
                        kv_heads=s.heads, head_dim=s.head_dim, mlp=s.mlp, rope_theta=s.rope_theta,
                        max_len=config.server.max_len),
        steps=s.steps, trajectories_per_step=s.trajectories_per_step,
        learning_rate=s.learning_rate, row_tokens=config.rl.row_tokens,
        micro_rows=config.rl.micro_rows, seed=s.seed)
  elif not (source / "config.json").is_file():
    raise wiring.UserError(
        f"start.dir={s.dir} holds no starting policy: run from the repository's root, or make one "
        "with --config.start.rebuild=True (about 20 minutes)")
  for target in (workdir.tokenizer, workdir.start):  # the second says that both are there
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, fresh)
    os.replace(fresh, target)


def make_learner(workdir: wiring.Workdir, config: ConfigDict, checkpoints: Checkpoints
                 ) -> tuple[Learner, int]:
  """The learner, and its step: the latest checkpoint's, or 0 for the starting policy."""
  rl = config.rl
  params, cfg = hf.load(workdir.start)
  learner = Learner(
      cfg, params, make_optimizer(rl.learning_rate, rl.warmup_steps, rl.clip_norm, rl.weight_decay),
      micro_rows=rl.micro_rows)
  latest = checkpoints.latest()
  if latest is None:
    save(checkpoints, 0, learner)
    return learner, 0
  learner.params, learner.opt_state, _ = checkpoints.restore(
      latest, learner.params, learner.opt_state)
  return learner, latest


def save(checkpoints: Checkpoints, step: int, learner: Learner) -> None:
  checkpoints.save(step, learner.params, learner.opt_state,
                   {"model": learner.cfg, "tokenizer": "../../tokenizer"})


# -------------------------------------------------------------------- the run's own state

_EXTENDABLE = ("rl.steps", "start.rebuild")  # may differ between two starts of one run


def adopt_config(workdir: wiring.Workdir, config: ConfigDict) -> None:
  """Makes `config` the workdir's, or refuses a workdir of another one and says what differs."""
  if workdir.config.is_file():
    saved = workdir.load_config()
    differences = [line for line in wiring.config_differences(saved, config)
                   if not line.startswith(tuple(f"{key}:" for key in _EXTENDABLE))]
    if differences:
      raise wiring.UserError(
          f"{workdir.path} is the workdir of another config; what differs:\n  "
          + "\n  ".join(differences)
          + "\nGive another --workdir, or the config that the run was started with.")
    if config.rl.steps < (Checkpoints(workdir.checkpoints).latest() or 0):
      raise wiring.UserError(f"{workdir.path} is past step {config.rl.steps} already: a run can "
                             "be extended, not shortened. Give another --workdir.")
  workdir.save_config(config)


def finished(workdir: wiring.Workdir, config: ConfigDict) -> bool:
  """Whether the last stage has left its summary for this many steps."""
  if not (workdir.summary.is_file() and workdir.report.is_file()):
    return False
  return json.loads(workdir.summary.read_text())["config"]["rl"]["steps"] == config.rl.steps


class Clock:
  """Minutes spent in each stage, added up over restarts and kept in a file."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    self.minutes: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {}

  @contextlib.contextmanager
  def __call__(self, stage: str) -> Iterator[None]:
    say(f"== {stage}")
    before, watch = self.minutes.get(stage, 0.0), Stopwatch()
    try:
      yield
    finally:
      self.minutes[stage] = round(before + watch() / 60, 3)
      wiring.write_json(self._path, self.minutes)


class Stopwatch:
  """Seconds since it was made or last called."""

  def __init__(self):
    self._since = time.monotonic()

  def __call__(self) -> float:
    now = time.monotonic()
    elapsed, self._since = now - self._since, now
    return elapsed


def say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
  wiring.main_guard(main)
