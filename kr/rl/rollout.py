"""Collects the trajectories of one step: groups of samples, run concurrently, graded, stored.

Everything that ends goes to the replay buffer at once, and what is returned comes from there.
So a step that was killed goes on where it was: finished trajectories are not run again,
paused ones run their remaining turns, the rest starts.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kr import types
from kr.agent import loop
from kr.rl.buffer import ReplayBuffer


class RolloutError(Exception):
  """Nothing could be rolled out; the text says what to do."""


@dataclasses.dataclass(frozen=True)
class _Job:
  """One trajectory to run; `resumed` when the buffer holds its first turns."""
  id: str
  task: types.Task
  sample: int
  resumed: bool = False


async def back_off(attempt: int) -> None:
  """Waits 0.5 s before the first retry, and twice as long before each further one."""
  await asyncio.sleep(0.5 * 2 ** attempt)


async def collect(
    tasks: Sequence[types.Task], group_size: int, *, step: int, seed: int, policy: Any,
    toolbox: Any, chat: Any, limits: Any, buffer: ReplayBuffer,
    grade: Callable[[types.Task, str], bool], concurrency: int,
    run: Callable[..., Awaitable[types.Trajectory]] = loop.run, budget_s: float | None = None,
    on_progress: Callable[[types.Trajectory, int, int], None] | None = None, retries: int = 2,
    before_retry: Callable[[int], Awaitable[None]] = back_off,
    clock: Callable[[], float] = time.monotonic) -> list[types.Trajectory]:
  """Runs `group_size` samples of each task and returns what is ready to train.

  Paused trajectories of earlier steps come first, then the tasks in order, `concurrency` at a
  time, each by `run` (the loop's arguments). Answers are graded by `grade`. After an
  infrastructure failure a trajectory is run again up to `retries` times, then stored as
  excluded. Each time is after `await before_retry(attempt)` (attempt from 0), the place to
  revive a server; several trajectories may be in it at once.

  When `budget_s` is over, running trajectories pause at their next turn boundary and what has
  not begun is stored as paused with no turns: the next step runs it on, under the weights of
  then (turn-level partial rollout). `on_progress(trajectory, done, total)` is called as
  each ends or pauses; `done` counts those that ended, in earlier calls too.

  Returns the finished, unconsumed trajectories of all complete groups, this step's and
  earlier ones; `by_group` tells them apart. A group with a paused member waits for it.
  Raises RolloutError when that is none because all that ran were infrastructure failures, and
  a bug's exception, out of `run` or `grade`, as it is: after cancelling the others.
  """
  jobs, done = _jobs(tasks, group_size, step, seed, buffer)
  total, deadline = done + len(jobs), None if budget_s is None else clock() + budget_s
  should_pause = lambda: deadline is not None and clock() >= deadline
  ran: list[types.Trajectory] = []

  async def attempt(job: _Job) -> types.Trajectory:
    return await run(
        job.task, policy, toolbox, chat, limits, trajectory_id=job.id, sample=job.sample,
        resume=buffer.get(job.id) if job.resumed else None, should_pause=should_pause)

  async def worker() -> None:
    nonlocal done
    while jobs:
      job = jobs.popleft()
      trajectory = await _with_retries(job, attempt, should_pause, retries, before_retry)
      if trajectory is not None:
        ran.append(trajectory)
        if trajectory.stop is types.StopReason.ANSWERED:
          trajectory.correct = bool(grade(trajectory.task, trajectory.answer))
      elif not job.resumed:  # out of time: what is resumed stays in the buffer as it is
        trajectory = types.Trajectory(job.id, job.task, job.sample, stop=types.StopReason.PAUSED)
      if trajectory is not None:
        buffer.put(trajectory, step)
        done += trajectory.stop is not types.StopReason.PAUSED
        if on_progress is not None:
          on_progress(trajectory, done, total)

  if concurrency < 1:
    raise ValueError(f"concurrency must be positive, not {concurrency}")
  await _all(worker() for _ in range(min(concurrency, len(jobs))))
  ready = [t for group in buffer.finished_unconsumed(step, group_size) for t in group]
  if ran and not ready:
    _refuse_failures(ran, step)
  return ready


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


def by_group(trajectories: Iterable[types.Trajectory]) -> list[list[types.Trajectory]]:
  """Splits what `collect` returned into its groups (one step's samples of one task), in order."""
  groups: dict[tuple[int, str], list[types.Trajectory]] = {}
  for t in trajectories:
    groups.setdefault((t.meta["step_made"], t.task.id), []).append(t)
  return list(groups.values())


def _jobs(tasks: Sequence[types.Task], group_size: int, step: int, seed: int,
          buffer: ReplayBuffer) -> tuple[collections.deque[_Job], int]:
  """What is left to run in `step`, and how many of its trajectories have ended already."""
  if group_size < 1:
    raise ValueError(f"group_size must be positive, not {group_size}")
  twice = [id for id, n in collections.Counter(t.id for t in tasks).items() if n > 1]
  if twice:
    raise ValueError(f"task {twice[0]} occurs twice in step {step}: a step's tasks must differ")
  jobs = collections.deque(
      _Job(t.id, t.task, t.sample, resumed=bool(t.turns)) for t in buffer.paused(step))
  fresh = [_Job(types.trajectory_id(seed, step, task.id, sample), task, sample)
           for task in tasks for sample in range(group_size)]
  rows, done = buffer.rows(job.id for job in fresh), 0
  for job in fresh:
    row = rows.get(job.id)
    if row is None or (row.state == "excluded" and row.step_written <= step):
      jobs.append(job)
    elif row.state != "paused":
      done += 1
  return jobs, done


async def _with_retries(
    job: _Job, attempt: Callable[[_Job], Awaitable[types.Trajectory]],
    should_pause: Callable[[], bool], retries: int,
    before_retry: Callable[[int], Awaitable[None]]) -> types.Trajectory | None:
  """The job's trajectory, infrastructure failures run again; None when there is no time left."""
  for number in range(retries + 1):
    if number:
      await before_retry(number - 1)
    if should_pause():
      return None
    trajectory = await attempt(job)
    if trajectory.stop is not types.StopReason.INFRASTRUCTURE:
      break
  return trajectory


def _refuse_failures(ran: Sequence[types.Trajectory], step: int) -> None:
  """Raises RolloutError when `ran` holds nothing but infrastructure failures."""
  if all(t.stop is types.StopReason.INFRASTRUCTURE for t in ran):
    raise RolloutError(
        f"all {len(ran)} trajectories that ran in step {step} ended in infrastructure failures; "
        f"the last one: {ran[-1].meta.get('error', 'no reason given')}. See that the inference "
        "server is up, read its log, and start the same command again: what had finished is kept")


async def _all(workers: Iterable[Awaitable[None]]) -> None:
  """Runs the workers to their end; the first error cancels the rest and is raised as itself."""
  try:
    async with asyncio.TaskGroup() as group:
      for worker in workers:
        group.create_task(worker)
  except BaseExceptionGroup as errors:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
      error = error.exceptions[0]
    raise error from None
