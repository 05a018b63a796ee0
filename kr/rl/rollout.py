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

from kr import types
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
    run: Callable[..., Awaitable[types.Trajectory]] | None = None, budget_s: float | None = None,
    on_progress: Callable[[types.Trajectory, int, int], None] = lambda trajectory, done, total: None,
    retries: int = 2, before_retry: Callable[[int], Awaitable[None]] = back_off,
    clock: Callable[[], float] = time.monotonic) -> list[types.Trajectory]:
  """Runs `group_size` samples of each task and returns what is ready to train.

  Paused trajectories of earlier steps come first, then the tasks in order; `concurrency` run
  at a time, by `run` (default `kr.agent.loop.run`, same arguments). Answers are graded by
  `grade`. A trajectory that ends in an infrastructure failure is run again up to `retries`
  times, each after `await before_retry(attempt)` (attempt from 0; the place to revive a
  server, and entered by several trajectories at once), then stored as excluded.

  With `budget_s`, when that many seconds are over the running trajectories pause at their next
  turn boundary, and what has not begun is stored as paused with no turns: the next
  call runs it all to its end, under the weights of then (turn-level partial rollout).

  `on_progress(trajectory, done, total)` is called as each ends or pauses; `done` counts those
  that ended.

  Returns the finished trajectories of all complete groups, this step's or earlier, that are
  not consumed; `by_group` tells the groups apart. A group with a paused member waits for it.

  Raises RolloutError when all that ran ended in infrastructure failures, and whatever a bug in
  `run`, a tool or `grade` raises, after cancelling the rest; the buffer then holds what ended.
  """
  if run is None:
    from kr.agent import loop
    run = loop.run
  if group_size < 1 or concurrency < 1:
    raise ValueError(f"group_size ({group_size}) and concurrency ({concurrency}) must be positive")
  jobs, done = _jobs(tasks, group_size, step, seed, buffer)
  total, deadline = done + len(jobs), None if budget_s is None else clock() + budget_s
  ended: list[types.Trajectory] = []

  def should_pause() -> bool:
    return deadline is not None and clock() >= deadline

  async def attempt(job: _Job) -> types.Trajectory:
    return await run(
        job.task, policy, toolbox, chat, limits, trajectory_id=job.id, sample=job.sample,
        resume=buffer.get(job.id) if job.resumed else None, should_pause=should_pause)

  async def worker() -> None:
    nonlocal done
    while jobs:
      job = jobs.popleft()
      trajectory = await _with_retries(job, attempt, should_pause, retries, before_retry)
      if trajectory.stop == types.StopReason.ANSWERED:
        trajectory.correct = bool(grade(trajectory.task, trajectory.answer))
      if trajectory.turns or not job.resumed:  # else: the buffer holds more of it than this
        buffer.put(trajectory, step)
      if trajectory.stop != types.StopReason.PAUSED:
        ended.append(trajectory)
        done += 1
      on_progress(trajectory, done, total)

  await _all(worker() for _ in range(min(concurrency, len(jobs))))
  if ended and all(t.stop == types.StopReason.INFRASTRUCTURE for t in ended):
    raise RolloutError(
        f"all {len(ended)} trajectories that ran in step {step} ended in infrastructure failures "
        f"({retries + 1} attempts each; the last: {ended[-1].fault or 'no reason given'}). Check "
        "that the inference server is up and read its log, then start the same command again: "
        "nothing that finished is lost")
  return [t for group in buffer.finished_unconsumed(step, group_size) for t in group]


def by_group(trajectories: Iterable[types.Trajectory]) -> list[list[types.Trajectory]]:
  """Splits what `collect` returned into its groups (one step's samples of one task), in order."""
  groups: dict[tuple[int, str], list[types.Trajectory]] = {}
  for t in trajectories:
    groups.setdefault((t.meta["step_made"], t.task.id), []).append(t)
  return list(groups.values())


def _jobs(tasks: Sequence[types.Task], group_size: int, step: int, seed: int,
          buffer: ReplayBuffer) -> tuple[collections.deque[_Job], int]:
  """What is left to run in `step`, and how many of its trajectories have ended already."""
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
    before_retry: Callable[[int], Awaitable[None]]) -> types.Trajectory:
  """The job's trajectory: run afresh after an infrastructure failure, not begun when out of time."""
  for number in range(retries + 1):
    if number:
      await before_retry(number - 1)
    if should_pause():
      return types.Trajectory(job.id, job.task, job.sample, stop=types.StopReason.PAUSED)
    trajectory = await attempt(job)
    if trajectory.stop != types.StopReason.INFRASTRUCTURE:
      break
  return trajectory


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
