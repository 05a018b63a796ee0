"""The pool: trajectories act, are graded and stored, while the learner trains what is complete.

One trajectory is one task of asyncio; none waits for another's turn, tool or grade. The group (all
samples of one task of one step) is what is trained, whole. Step n updates policy n−1; its tasks
may begin `max_staleness` policies earlier, so that acting goes on while learning does.

Everything that ends goes to the replay buffer at once, and what is trained comes from there; what
has begun has a row there from the first moment. So a step that was killed goes on where it was:
finished trajectories are not run again, paused ones run their remaining turns, the rest starts.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import gc
import inspect
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from kr import types
from kr.agent import loop
from kr.rl.buffer import ReplayBuffer
from kr.rl.pace import Gate, Pace


# A full garbage collection walks through each token of each trajectory. Python would do so whenever
# there are a quarter more of them; after this many smaller collections is enough.
_FULL_COLLECTION = 1000
_COUNTED = ("turn_timeouts", "tool_timeouts", "mixed_versions")  # in a trajectory's meta


class RolloutError(Exception):
  """Nothing could be rolled out; the text says what to do."""


class Left(Exception):
  """The pool was told to leave; whatever ran has stopped at a turn boundary and is stored."""


@dataclasses.dataclass(frozen=True)
class _Job:
  """One trajectory to run; `resumed` when the buffer holds its first turns."""
  id: str
  task: types.Task
  sample: int
  step: int  # that made it
  resumed: bool = False

  @property
  def group(self) -> tuple[int, str]:
    return self.step, self.task.id


@dataclasses.dataclass
class _Group:
  """A group that no step has trained: how many members it has here, and who has not ended."""
  total: int = 0
  pending: set[str] = dataclasses.field(default_factory=set)


async def back_off(attempt: int) -> None:
  """Waits 0.5 s before the first retry, and twice as long before each further one."""
  await asyncio.sleep(0.5 * 2 ** attempt)


class Pool:
  """Runs `group_size` samples of each of `tasks_of(step)`; a context manager of one event loop.

  Each trajectory is run by `run` (the loop's arguments). Answers are graded by `grade`, a plain
  function or a coroutine's, which runs beside the rollouts. After an infrastructure failure a
  trajectory is run again up to `retries` times, then stored as excluded. Each time is after
  `await before_retry(attempt)` (attempt from 0), the place to revive a server; several
  trajectories may be in it at once. `on_progress(trajectory, done, total)` is called as each
  ends or pauses, of the open groups.

  Leaving the context without an error stops at turn boundaries and stores what runs; with an
  error, or cancelled, it is cancelled, and its row says where it goes on.
  """

  def __init__(self, tasks_of: Callable[[int], Sequence[types.Task]], group_size: int, pace: Pace,
               *, seed: int, policy: Any, toolbox: Any, chat: Any, limits: Any,
               buffer: ReplayBuffer, grade: Callable[[types.Task, str], bool | Awaitable[bool]],
               run: Callable[..., Awaitable[types.Trajectory]] = loop.run,
               on_progress: Callable[[types.Trajectory, int, int], None] | None = None,
               retries: int = 2, before_retry: Callable[[int], Awaitable[None]] = back_off,
               clock: Callable[[], float] = time.monotonic):
    if group_size < 1:
      raise ValueError(f"group_size must be positive, not {group_size}")
    self.pace, self.drain_s = pace, 0.0  # what the last publication waited for turns to end
    self._counts = collections.Counter()
    self._tasks_of, self._group_size, self._seed = tasks_of, group_size, seed
    self._parts, self._buffer, self._grade = (policy, toolbox, chat, limits), buffer, grade
    self._run, self._on_progress, self._clock = run, on_progress, clock
    self._retries, self._before_retry = retries, before_retry
    self._gate = Gate()
    self._groups: dict[tuple[int, str], _Group] = {}
    self._queue: collections.deque[_Job] = collections.deque()
    self._acting, self._running = 0, set()  # trajectories; tasks of asyncio, those graded too
    self._step, self._opened = 0, 0  # the step that what ends now belongs to; the last one begun
    self._deadline: float | None = None
    self._pausing = self._leaving = False
    self._changed, self._error = asyncio.Event(), None
    self._ended, self._failures = 0, []  # since the last step was complete

  # -- For the trainer --------------------------------------------------------------------

  async def collect(self, step: int) -> list[types.Trajectory]:
    """What `step` trains: the finished trajectories of all complete groups, when there is enough.

    Returns those that no step has trained, of this step and of earlier ones; `by_group` tells
    them apart. With max_staleness 0 nothing runs any more when it returns: what was unfinished
    has stopped at its next turn boundary, and its remaining turns run first in the next step,
    under the weights of then (turn-level partial rollout). Else acting goes on.

    Raises RolloutError when there is nothing because all that ran were infrastructure failures,
    Left after `leave`, and a bug's exception, out of `run` or `grade`, as it is.
    """
    self._begin(step)
    while True:
      self._changed.clear()
      if self._error is not None:
        raise self._error
      self._start()
      if not self._running and (self._leaving or not self.pace.max_staleness):
        break
      if not self._leaving and self._has_enough():
        if self.pace.max_staleness:
          break
        self._pausing = True
      left_s = self._left_s()
      with contextlib.suppress(TimeoutError):  # the budget is over: look again
        await asyncio.wait_for(self._changed.wait(), left_s if left_s and left_s > 0 else None)
    if self._leaving:
      raise Left(f"left in step {step}: the same command goes on where it was, also in mid-rollout")
    return self._deliver(step)

  @contextlib.asynccontextmanager
  async def publishing(self) -> AsyncIterator[None]:
    """Encloses the publication of new weights: no turn runs within, so none is lost or mixed.

    Aborting the turns that run and sampling them again would waste them, and the longer a turn
    the likelier: what is then trained would lean to short turns, which the policy did not.
    """
    start = self._clock()
    async with self._gate.shut():
      self.drain_s = self._clock() - start
      yield

  def leave(self) -> None:
    """Has everything stop at its next turn boundary; `collect` then raises Left."""
    self._leaving = True
    self._changed.set()

  def take_counts(self) -> dict[str, int]:
    """What happened since the last call: `paused` trajectories that were left to the next step,
    and `resumed` ones; turns and calls over their time limits, turns of mixed versions."""
    counts, self._counts = self._counts, collections.Counter()
    return {key: counts[key] for key in ("paused", "resumed", *_COUNTED)}

  async def __aenter__(self) -> "Pool":
    self._thresholds = gc.get_threshold()
    gc.set_threshold(*self._thresholds[:2], _FULL_COLLECTION)
    return self

  async def __aexit__(self, kind, *unused) -> None:
    gc.set_threshold(*self._thresholds)
    self._leaving = True
    for task in self._running if kind or self._error else ():
      task.cancel()
    await asyncio.gather(*self._running, return_exceptions=True)
    if kind is None and self._error is not None:
      raise self._error

  # -- Steps ------------------------------------------------------------------------------

  def _begin(self, step: int) -> None:
    self._step, self._pausing = step, False
    for number in range(max(step, self._opened + 1), step + self.pace.max_staleness + 1):
      self._open(number)
    self._deadline = None if self.pace.budget_s is None else self._clock() + self.pace.budget_s

  def _open(self, step: int) -> None:
    """Queues what is left to run of `step`: what earlier ones left over, then its own tasks."""
    tasks = self._tasks_of(step)
    twice = [id for id, n in collections.Counter(t.id for t in tasks).items() if n > 1]
    if twice:
      raise ValueError(f"task {twice[0]} occurs twice in step {step}: a step's tasks must differ")
    own = [_Job(types.trajectory_id(self._seed, step, task.id, sample), task, sample, step)
           for task in tasks for sample in range(self._group_size)]
    ids = {job.id for job in own}
    paused = {t.id: _Job(t.id, t.task, t.sample, t.meta["step_made"], bool(t.turns))
              for t in self._buffer.paused(step)}
    written = self._buffer.rows(paused)
    # A step that is repeated leaves alone what it had left to the one after it.
    jobs = [job for job in paused.values() if job.id not in ids and not self._knows(job)
            and written[job.id].step_written <= self._step]
    rows, begun, decided = self._buffer.rows(ids), [], self._buffer.decided(step)
    for job in own:
      row = rows.get(job.id)
      if row is None or row.state == "excluded" and row.step_written <= step and not decided:
        begun.append(types.Trajectory(job.id, job.task, job.sample, stop=types.StopReason.PAUSED))
        jobs.append(job)
      elif job.id in paused:
        jobs.append(paused[job.id])
      elif row.state != "paused":  # else a later step runs it on: this one is repeated
        self._groups.setdefault(job.group, _Group()).total += 1
    self._buffer.begin(begun, step)
    for job in jobs:
      group = self._groups.setdefault(job.group, _Group())
      group.total += 1
      group.pending.add(job.id)
    self._queue.extend(jobs)
    self._opened = step

  def _knows(self, job: _Job) -> bool:
    return job.group in self._groups and job.id in self._groups[job.group].pending

  def _has_enough(self) -> bool:
    """Whether the step may train: all is complete, or what it may leave out is not needed."""
    due = {key: group for key, group in self._groups.items() if key[0] <= self._step}
    complete = sum(not group.pending for group in due.values())
    if complete == len(due):
      return True
    if not self.pace.partial or any(
        group.pending and self._overdue(made) for (made, _), group in due.items()):
      return False
    if self.pace.enough < 1 and complete >= math.ceil(self.pace.enough * len(due)):
      return True
    left_s = self._left_s()
    return complete > 0 and left_s is not None and left_s <= 0  # with nothing it would be in vain

  def _overdue(self, made: int) -> bool:
    """Whether what step `made` began must end in this step."""
    return self._step - made >= self.pace.max_pauses

  def _left_s(self) -> float | None:
    """Seconds until the budget is over, or None. With max_staleness 0 the trajectories ask."""
    if self._deadline is None or not self.pace.max_staleness:
      return None
    return self._deadline - self._clock()

  def _deliver(self, step: int) -> list[types.Trajectory]:
    ready = [t for g in self._buffer.finished_unconsumed(step, self._group_size) for t in g]
    ended, failures, self._ended, self._failures = self._ended, self._failures, 0, []
    if failures and ended == len(failures) and not ready:
      raise RolloutError(
          f"all {ended} trajectories that ran in step {step} ended in infrastructure failures; the "
          f"last one: {failures[-1]}. See that the inference server is up, read its log, and start "
          "the same command again: what had finished is kept")
    self._buffer.decide(step)
    due = [key for key in self._groups if key[0] <= step]
    self._counts["paused"] += sum(len(self._groups[key].pending) for key in due)
    if self.pace.max_staleness:
      for key in due:
        if not self._groups[key].pending:
          del self._groups[key]
    else:  # all of them are in the buffer, and the next step reads them there
      self._groups.clear()
      self._queue.clear()
    self._step = step + 1  # what ends from now on
    return ready

  # -- One trajectory ---------------------------------------------------------------------

  def _start(self) -> None:
    while (self._queue and self._acting < self.pace.concurrency and self._error is None
           and not self._should_pause(self._queue[0])):
      job = self._queue.popleft()
      self._acting += 1
      self._counts["resumed"] += job.resumed
      task = asyncio.create_task(self._live(job))
      self._running.add(task)
      task.add_done_callback(self._over)

  def _over(self, task: asyncio.Task) -> None:
    self._running.discard(task)
    self._changed.set()
    if self._error is not None or self._leaving and task.cancelled():
      return
    if task.cancelled():  # by nobody here: its group would wait for it for ever
      self._error = RolloutError("a rollout was cancelled from outside: start the command again")
    else:
      self._error = task.exception()

  def _should_pause(self, job: _Job) -> bool:
    if self._leaving:
      return True
    if self.pace.partial and self._overdue(job.step):
      return False
    if (self._deadline is not None and not self.pace.max_staleness and not self._pausing
        and self._clock() >= self._deadline):
      self._pausing = True
    return self._pausing

  async def _live(self, job: _Job) -> None:
    """Acts, is graded, is stored; the place among those that act is free while it is graded."""
    try:
      trajectory = await self._act(job)
    finally:
      self._acting -= 1
    self._start()
    if trajectory is None:  # no time left: what the buffer holds of it stays as it is
      return
    if trajectory.stop is types.StopReason.ANSWERED and trajectory.correct is None:
      correct = self._grade(trajectory.task, trajectory.answer)
      trajectory.correct = bool(await correct if inspect.isawaitable(correct) else correct)
    self._store(job, trajectory)

  async def _act(self, job: _Job) -> types.Trajectory | None:
    """The job's trajectory, infrastructure failures run again; None when there is no time left."""
    for number in range(self._retries + 1):
      if number:
        await self._before_retry(number - 1)
        if self._should_pause(job):
          return None
      resume = self._buffer.get(job.id) if job.resumed else None
      trajectory = await self._run(
          job.task, *self._parts, trajectory_id=job.id, sample=job.sample, resume=resume,
          should_pause=lambda: self._should_pause(job), gate=self._gate.turn)
      for key in _COUNTED:
        before = resume.meta.get(key, 0) if resume else 0
        self._counts[key] += trajectory.meta.get(key, 0) - before
      if trajectory.stop is not types.StopReason.INFRASTRUCTURE:
        break
    return trajectory

  def _store(self, job: _Job, trajectory: types.Trajectory) -> None:
    self._buffer.put(trajectory, max(job.step, self._step), made=job.step)
    group = self._groups[job.group]
    if trajectory.stop is not types.StopReason.PAUSED:
      group.pending.discard(job.id)
      self._ended += 1
    if trajectory.stop is types.StopReason.INFRASTRUCTURE:
      self._failures.append(trajectory.meta.get("error", "no reason given"))
    if self._on_progress is not None:
      groups = self._groups.values()
      total = sum(g.total for g in groups)
      self._on_progress(trajectory, total - sum(len(g.pending) for g in groups), total)
