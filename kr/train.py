r"""Trains a research agent end to end, from nothing to a report.

    python -m kr.train --config=configs/quickstart.py --workdir=runs/quickstart

Stages, each resumable: an offline web, tasks over it, a starting policy, an inference
server, evaluation, reinforcement learning, evaluation, report. The same command goes on
where it was stopped, however it was stopped; --config.rl.steps=60 extends a finished run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
import contextlib
import os
import pathlib
import signal
import sys
import threading
from typing import Any

from absl import flags
from absl import logging
import ml_collections
from ml_collections import config_flags
import tqdm

from kr import experiment
from kr import plan
from kr import serving
from kr import stages
from kr import types
from kr import wiring
from kr.data.grade import grade
from kr.eval import report
from kr.eval import runner
from kr.eval import stats
from kr.model import compiled
from kr.model import cost
from kr.model import heap
from kr.model.checkpoint import Checkpoints
from kr.rl import batch as batch_lib
from kr.rl import credit
from kr.rl import metrics as metrics_lib
from kr.rl import rollout
from kr.rl.buffer import ReplayBuffer
from kr.rl.learner import Learner
from kr.rl.pool import Left, Pool

ConfigDict = ml_collections.ConfigDict

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The experiment, such as configs/quickstart.py.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where everything of the run is kept.")
_PLAN = flags.DEFINE_bool("plan", False, "Print what a step would need on the mesh, and end.")
_MESH = flags.DEFINE_string("mesh", None, "Instead of config.learner.mesh: fsdp=64,tensor=4.")
_CHIP = flags.DEFINE_enum("chip", "v5e", sorted(cost.CHIPS), "What the mesh of --plan is made of.")
_TERMINATED = 128 + signal.SIGTERM  # exit status

flags.mark_flag_as_required("config")
flags.register_multi_flags_validator(
    ["workdir", "plan"], lambda given: given["plan"] or given["workdir"] is not None,
    "Flag --workdir must have a value other than None (only --plan does without).")


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise wiring.UserError(f"kr.train takes flags only, not {' '.join(argv[1:])!r}; see --help")
  logging.set_verbosity(logging.WARNING)
  config = _CONFIG.value
  if _MESH.value is not None and "learner" in config:
    config.learner.mesh = _MESH.value
  experiment.check_config(config)
  if _PLAN.value:
    sys.exit(plan.main(config, _CHIP.value))
  workdir = wiring.Workdir.create(_WORKDIR.value)
  with contextlib.ExitStack() as stack:
    buffer = stack.enter_context(ReplayBuffer(workdir.buffer))  # locked: one trainer a workdir
    experiment.adopt_config(workdir, config)
    if experiment.finished(workdir, config):
      print(f"{workdir.path} is complete at {config.rl.steps} steps: see {workdir.report}\n"
            f"Extend it with --config.rl.steps={config.rl.steps + 20}.")
      return
    compiled.keep()
    try:
      run_stages(config, workdir, buffer, stages.Clock(workdir.path / "minutes.json"), stack)
    except Left as e:
      stages.say(str(e))
      sys.exit(_TERMINATED)  # through the stack, which has the checkpoint get whole


def run_stages(config: ConfigDict, workdir: wiring.Workdir, buffer: ReplayBuffer,
               clock: stages.Clock, stack: contextlib.ExitStack) -> None:
  """All stages in order; `stack` ends what they start."""
  # ---------------------------------------------------------------- world, tasks
  with clock("world"):
    world = stages.make_world(workdir, config)
  with clock("tasks"):
    train, heldout, guessed = stages.make_tasks(workdir, config, world)

  # ---------------------------------------------------------------- starting policy
  with clock("start"):
    stages.make_start(workdir, config, world, train)
    train = stages.make_examples(workdir, config, train)
    checkpoints = Checkpoints(workdir.checkpoints, keep=config.rl.keep_checkpoints)
    stack.callback(checkpoints.wait)  # however the run ends, what is being written gets whole
    learner, restored, meta = experiment.make_learner(workdir, config, checkpoints)

  # ---------------------------------------------------------------- server, RL, evaluations
  results: dict[str, list[types.Trajectory]] = {}
  with clock("server"):
    session = stack.enter_context(serving.session(
        config, workdir, pathlib.Path(checkpoints.policy_path(restored)), version=restored,
        learner=learner))

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
        stages.say(f"{workdir.eval('before')} is gone: the report will have no column for before")
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
                    checkpoints: Checkpoints, session: serving.Session, buffer: ReplayBuffer,
                    writer: metrics_lib.MetricsWriter, clock: stages.Clock) -> None:
  """REINFORCE. Step n updates policy n-1 with what it sampled, or one before it if that is
  allowed, and publishes policy n. Acting goes on meanwhile, if that is."""
  rl, pace = config.rl, experiment.pace(config)
  buffer.rewind(restored)  # what was trained after that checkpoint is to be trained again

  def tasks_of(step: int) -> list[types.Task]:
    count = rl.tasks_per_step if step <= rl.steps else 0
    return rollout.pick_tasks(train, config.seed, step, count)

  def on_progress(_, done: int, total: int) -> None:
    steps.set_postfix_str(f"rollout {done}/{total}", refresh=False)
    steps.update(0)  # draws, if it is time to

  async with contextlib.AsyncExitStack() as stack:
    steps = stack.enter_context(stages.bar("reinforce", rl.steps, "step", restored))
    pool = await stack.enter_async_context(Pool(
        tasks_of, rl.group_size, pace, seed=config.seed, policy=session.policy,
        toolbox=session.toolbox, chat=session.chat, limits=experiment.limits(config), buffer=buffer,
        grade=grade, on_progress=on_progress))
    stack.enter_context(preemptible(pool, config.rollout.grace_s))
    for step in range(restored + 1, rl.steps + 1):
      seconds, watch = {}, stages.Stopwatch()

      # ---- rollout: groups of trajectories, concurrently
      trajectories = await pool.collect(step)
      rollout.assert_on_policy(trajectories, step - 1, pace.oldest)
      seconds["rollout_s"] = watch()
      await settle(checkpoints, step - 1, session)
      seconds["checkpoint_s"] = watch()

      # ---- reward, advantage, negative sample control, update
      rewards, advantages, keep = credit.assign(
          trajectories, gamma=rl.gamma, format_penalty=rl.format_penalty,
          negatives_keep=rl.negatives_keep, protect_faults=rl.protect_faults,
          seed=[config.seed, step])
      batches = batch_lib.pack_by_length(
          zip(trajectories, advantages, keep), rl.row_tokens, rl.micro_rows, rl.row_buckets,
          rl.share_prefix)
      await session.sleep()
      update = await asyncio.to_thread(learner.update, batches, step - 1)
      check_gap(step, update.get("logprob_gap", 0.0), rl.max_logprob_gap)
      seconds["update_s"] = watch()

      # ---- checkpoint, publish. Rows are consumed first, and rewound if no checkpoint follows.
      row = {**metrics_lib.summarize(trajectories, rewards, buffer.counts(step)["excluded"]),
             **metrics_lib.staleness(trajectories, step - 1), **pool.take_counts(),
             **update, **seconds, "discarded": int((~keep).sum()),
             "padding_share": batch_lib.padding_share(batches)}
      buffer.consume([t.id for t in trajectories], step)
      policy_dir = await asyncio.to_thread(
          checkpoints.save_async, step, *learner.state(), experiment.meta_of(learner, row))
      async with pool.publishing():
        await session.publish(policy_dir, step)
      seconds["publish_s"] = watch()

      row |= {"publish_s": seconds["publish_s"], "drain_s": pool.drain_s,
              "tokens_per_s": sum(len(s) for t in trajectories for s in t.segments)
                              / sum(seconds.values())}
      writer.write(step, row)
      clock.add("reinforce", sum(seconds.values()))
      tqdm.tqdm.write(metrics_lib.console_line(step, row), file=sys.stderr)
      steps.update()
  await settle(checkpoints, rl.steps, session)
  checkpoints.sweep()
  if paused := buffer.counts()["paused"]:
    stages.say(f"{paused} trajectories are paused in the buffer: more steps would go on with them")


@contextlib.contextmanager
def preemptible(pool: Pool, grace_s: float) -> Iterator[None]:
  """On SIGTERM rollouts stop at turn boundaries and are stored, a step that learns is finished.

  What is not done `grace_s` after the signal is left: the process ends as if it were killed.
  """
  def leave() -> None:
    stages.say(f"SIGTERM: leaving within {grace_s:g} s")
    timer = threading.Timer(grace_s, os._exit, (_TERMINATED,))
    timer.daemon = True
    timer.start()
    pool.leave()

  events = asyncio.get_running_loop()
  events.add_signal_handler(signal.SIGTERM, leave)
  try:
    yield
  finally:
    events.remove_signal_handler(signal.SIGTERM)


async def settle(checkpoints: Checkpoints, step: int, session: serving.Session) -> None:
  """Ends the overlap: the checkpoint of `step`, whose policy is served, is whole.

  Strictly on-policy, a rollout cannot begin before the policy lies on disk, where the server
  reads it. What it need not wait for is the rest, most of all the optimizer's state, twice as
  large: that is written while the next step rolls out. A kill in between goes on from the step
  before; it finds the same trajectories in the buffer, so the same update makes the same policy
  again, and what was rolled out under it waits there for its turn.
  """
  await asyncio.to_thread(checkpoints.wait)
  session.moved(checkpoints.policy_path(step))


def check_gap(step: int, gap: float, bound: float) -> None:
  """Stops the run if server and learner disagree about the probability of what was sampled."""
  if not gap <= bound:
    raise wiring.UserError(
        f"step {step}: the server's logprobs differ from the learner's by {gap:.2e} on average, "
        f"more than rl.max_logprob_gap={bound:g}. The two do not run the same policy: that is a "
        "bug, not noise. Nothing was saved of this step.")


if __name__ == "__main__":
  heap.use_huge_pages()
  wiring.main_guard(main)
