import asyncio
import contextlib
import functools
import pathlib
import signal
import subprocess
import sys
import tempfile

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import kr
from kr import types
from kr.agent import loop, policy
from kr.agent.chat import Action
from kr.rl import batch
from kr.rl import buffer as buffers
from kr.rl import pool as pools
from kr.rl import rollout
from kr.tools.base import Toolbox
from kr.types import StopReason


class Script:
  """Stands in for the loop: task "n" takes n turns, one `await` each, and answers the task's id.

  `failures[id of a task]` counts down infrastructure failures, each after one turn.
  """

  def __init__(self):
    self.version, self.failures, self.calls = 0, {}, []
    self.running = self.most_running = 0
    self.before_turn = lambda task, turn: None

  async def run(self, task, policy, toolbox, chat, limits, *, trajectory_id, sample=0, resume=None,
                should_pause=lambda: False, gate=contextlib.nullcontext):
    self.calls.append((task.id, sample, len(resume.turns) if resume else None))
    self.running += 1
    self.most_running = max(self.most_running, self.running)
    try:
      result = resume or types.Trajectory(trajectory_id, task, sample)
      if not result.segments:
        result.segments.append(types.Segment([1], [0], [0.0], [-1]))
      result.stop = await self.turns(result, should_pause, gate)
      return result
    finally:
      self.running -= 1

  async def turns(self, result, should_pause, gate):
    task, segment = result.task, result.segments[0]
    for turn in range(len(result.turns), task.hops):
      if should_pause():
        return StopReason.PAUSED
      async with gate():
        self.before_turn(task, turn)
        await asyncio.sleep(0)
        segment.append_sampled([2], [-0.5], self.version)
      result.turns.append(types.Turn(0, len(segment) - 1, len(segment), self.version))
      if self.failures.get(task.id, 0):
        self.failures[task.id] -= 1
        result.meta["error"] = "server gone"
        return StopReason.INFRASTRUCTURE
    if task.kind == "fault":
      return StopReason.INVALID_ACTION
    result.answer = task.id
    return StopReason.ANSWERED


def task(id, turns=1, kind="look-up", answer=None):
  return types.Task(id, "?", id if answer is None else answer, kind, hops=turns)


async def no_wait(attempt):
  pass


def make_pool(tasks_of, store, script, group_size=2, **kwargs):
  pace = {k: kwargs.pop(k) for k in ("concurrency", "max_staleness", "budget_s", "enough",
                                     "max_pauses") if k in kwargs}
  kwargs = {"grade": lambda task, answer: answer == task.answer, "run": script.run,
            "policy": None, "toolbox": None, "chat": None, "limits": None,
            "before_retry": no_wait, **kwargs}
  return pools.Pool(tasks_of, group_size, pools.Pace(**{"concurrency": 3, **pace}), seed=0,
                    buffer=store, **kwargs)


async def collect_in(tasks, store, script, step=1, **kwargs):
  async with make_pool(lambda _: tasks, store, script, **kwargs) as pool:
    return await pool.collect(step)


def collect(tasks, store, script, step=1, **kwargs):
  return asyncio.run(collect_in(tasks, store, script, step, **kwargs))


def names(trajectories):
  return [(t.task.id, t.sample) for t in trajectories]


def test_runs_every_sample_once_grades_and_stores(store, script):
  tasks = [task("a"), task("b", turns=3, answer="other"), task("c", kind="fault")]
  got = collect(tasks, store, script)
  assert names(got) == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("c", 1)]
  assert [t.correct for t in got] == [True, True, False, False, None, None]
  assert [t.id for t in got] == [types.trajectory_id(0, 1, t.task.id, t.sample) for t in got]
  assert store.counts() == {"paused": 0, "finished": 6, "excluded": 0, "consumed": 0}
  assert [names(g) for g in rollout.by_group(got)] == [names(got[i:i + 2]) for i in (0, 2, 4)]


def test_no_more_than_concurrency_run_at_a_time(store, script):
  collect([task(str(i), turns=4) for i in range(6)], store, script, concurrency=5)
  assert script.most_running == 5


def test_a_repeated_step_runs_only_what_had_not_finished(store, script):
  def bug(task, turn):
    if task.id == "c":
      raise RuntimeError("bug")
  script.before_turn = bug
  with pytest.raises(RuntimeError, match="bug"):
    collect([task("a"), task("b"), task("c")], store, script, concurrency=1)
  script.before_turn, script.calls = lambda task, turn: None, []
  progress = []
  got = collect([task("a"), task("b"), task("c")], store, script,
                on_progress=lambda t, done, total: progress.append((t.task.id, done, total)))
  assert script.calls == [("c", 0, None), ("c", 1, None)]
  assert progress == [("c", 5, 6), ("c", 6, 6)]
  assert len(got) == 6


def test_kill_9_in_mid_rollout_loses_and_repeats_no_finished_trajectory(tmp_path):
  path = tmp_path / "buffer.db"
  folders = [str(pathlib.Path(kr.__file__).parents[1]), str(pathlib.Path(__file__).parent)]
  child = subprocess.Popen([sys.executable, "-c", f"""
import sys; sys.path[:0] = {folders!r}
from test_pool import *
collect([task(str(i), turns=3) for i in range(300)], buffers.ReplayBuffer({str(path)!r}), Script(),
        on_progress=lambda t, done, total: print(t.task.id, t.sample, flush=True))
"""], stdout=subprocess.PIPE, text=True)
  lines = [child.stdout.readline() for _ in range(30)]
  child.send_signal(signal.SIGKILL)
  lines += child.stdout.read().splitlines()
  child.wait()
  ended = {(id, int(sample)) for id, sample in map(str.split, lines)}
  with buffers.ReplayBuffer(path) as store:
    script, tasks = Script(), [task(str(i), turns=3) for i in range(300)]
    got = collect(tasks, store, script)
  assert not ended & {(id, sample) for id, sample, _ in script.calls}
  assert sorted(names(got)) == sorted((t.id, sample) for t in tasks for sample in range(2))


def test_a_bug_cancels_the_rest_and_keeps_what_ended(store, script):
  gone = []

  async def run(task, *args, sample, **kwargs):
    if task.id == "hang":
      try:
        await asyncio.Event().wait()
      except asyncio.CancelledError:
        gone.append(sample)
        raise
    if task.id == "bug":
      raise ZeroDivisionError("a bug, by itself and not in a group of exceptions")
    return await script.run(task, *args, sample=sample, **kwargs)

  with pytest.raises(ZeroDivisionError):
    collect([task("a"), task("hang"), task("bug")], store, script, group_size=1, run=run,
            concurrency=2)
  assert gone == [0]
  assert store.counts()["finished"] == 1


def test_cancelling_leaves_the_buffer_consistent(store, script):
  async def main():
    started = asyncio.Event()

    async def run(task, *args, **kwargs):
      if task.id == "hang":
        started.set()
        await asyncio.Event().wait()
      return await script.run(task, *args, **kwargs)

    work = asyncio.create_task(collect_in(
        [task("a"), task("hang")], store, script, group_size=1, run=run, concurrency=1))
    await started.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
      await work

  asyncio.run(main())
  assert store.counts() == {"paused": 1, "finished": 1, "excluded": 0, "consumed": 0}
  assert names(collect([task("a"), task("hang")], store, script, group_size=1)) == [
      ("a", 0), ("hang", 0)]


def test_infrastructure_failures_are_run_again_from_the_start(store, script):
  script.failures = {"a": 2}
  attempts = []

  async def before_retry(attempt):
    attempts.append(attempt)

  got = collect([task("a", turns=2)], store, script, group_size=1, before_retry=before_retry)
  assert attempts == [0, 1]
  assert script.calls == [("a", 0, None)] * 3
  assert [len(t.turns) for t in got] == [2] and got[0].correct


def test_what_keeps_failing_is_excluded_counted_and_never_graded(store, script):
  script.failures = {"a": 3}
  got = collect([task("a"), task("b")], store, script, concurrency=1)
  assert names(got) == [("a", 1), ("b", 0), ("b", 1)]
  assert store.counts()["excluded"] == 1
  assert [t.correct for t in store.all(1) if t.stop is StopReason.INFRASTRUCTURE] == [None]


def test_nothing_but_failures_stops_with_the_reason_and_can_be_repeated(store, script):
  script.failures = {"a": 6}
  with pytest.raises(pools.RolloutError, match="all 2 trajectories .* server gone"):
    collect([task("a")], store, script)
  assert store.counts()["excluded"] == 2
  assert len(collect([task("a")], store, script)) == 2


def test_out_of_budget_pauses_and_the_next_step_runs_the_remaining_turns(store, script):
  now = [0.0]

  def tick(task, turn):
    now[0] += 1  # each turn takes a second

  script.before_turn = tick
  tasks = [task("a", turns=1), task("b", turns=5), task("c", turns=2)]
  got = collect(tasks, store, script, group_size=1, concurrency=1, budget_s=3, clock=lambda: now[0])
  assert names(got) == [("a", 0)]
  assert store.counts() == {"paused": 2, "finished": 1, "excluded": 0, "consumed": 0}
  store.consume([t.id for t in got], 1)

  script.version, script.calls = 1, []
  got = collect([task("d")], store, script, step=2, group_size=1, concurrency=1)
  assert script.calls == [("b", 0, 2), ("c", 0, None), ("d", 0, None)]  # b goes on, c had not begun
  assert names(got) == [("b", 0), ("c", 0), ("d", 0)]
  assert [turn.version for turn in got[0].turns] == [0, 0, 1, 1, 1]
  assert got[0].correct and got[0].id == types.trajectory_id(0, 1, "b", 0)


def test_no_time_left_leaves_a_paused_trajectory_as_it_was(store, script):
  clock = iter([0, 0, 0, 1] + [1] * 9)
  collect([task("a", turns=4)], store, script, group_size=1, budget_s=1, clock=lambda: next(clock))
  id = types.trajectory_id(0, 1, "a", 0)
  assert len(store.get(id).turns) == 1
  assert collect([], store, script, step=2, group_size=1, budget_s=0) == []
  assert len(store.get(id).turns) == 1
  assert store.rows([id])[id].state == "paused"


def test_a_group_waits_for_its_paused_member(store, script):
  now = [0.0]

  def tick(task, turn):
    now[0] += 1

  script.before_turn = tick
  tasks = [task("a", turns=2)]
  assert collect(tasks, store, script, concurrency=1, budget_s=3, clock=lambda: now[0]) == []
  assert names(collect([], store, script, step=2)) == [("a", 0), ("a", 1)]


def test_a_failure_while_resuming_starts_again_from_the_pause(store, script):
  clock = iter([0, 0, 0, 0, 1])
  collect([task("a", turns=4)], store, script, group_size=1, budget_s=1, clock=lambda: next(clock))
  script.failures, script.calls = {"a": 1}, []
  got = collect([], store, script, step=2, group_size=1)
  assert script.calls == [("a", 0, 2), ("a", 0, 2)]
  assert [len(t.turns) for t in got] == [4] and got[0].sampled_tokens == 4


def test_a_step_repeated_after_a_restore_does_not_run_what_later_steps_resumed(store, script):
  clock = iter([0, 0, 0, 1])
  collect([task("a", turns=3)], store, script, group_size=1, budget_s=1, clock=lambda: next(clock))
  got = collect([task("b")], store, script, step=2, group_size=1)
  store.consume([t.id for t in got], 2)
  store.rewind(0)
  script.calls = []
  assert collect([task("a", turns=3)], store, script, step=1, group_size=1) == []
  assert names(collect([task("b")], store, script, step=2, group_size=1)) == [("a", 0), ("b", 0)]
  assert script.calls == []


@pytest.mark.parametrize("tasks, kwargs, message", [
    ([task("a"), task("a")], {}, "occurs twice"),
    ([task("a")], {"group_size": 0}, "group_size"),
    ([task("a")], {"concurrency": 0}, "concurrency"),
])
def test_bad_arguments_are_named(store, script, tasks, kwargs, message):
  with pytest.raises(ValueError, match=message):
    collect(tasks, store, script, **kwargs)


class Recorder(Script):
  """A policy, chat and context for the real loop: all ids are drawn, all samples recorded.

  A turn is a call of no tool; the one after `turns` turns answers. `plan[i]` says what the
  i-th request meets: "abort" (partial tokens, to be dropped), "cut" (the history is rewritten
  after it), or neither. A prompt, an observation and a rewrite are random ids.
  """
  stop_ids = [0]

  def __init__(self, seed, turns, plan):
    super().__init__()
    self.rng, self.last, self.plan = np.random.default_rng(seed), turns, plan
    self.requests, self.sampled, self.answered = 0, [], 0
    self.cut = False

  def ids(self):
    return self.rng.integers(1, 50, self.rng.integers(1, 6)).tolist()

  async def generate(self, ids, *, max_new_tokens, stop_ids, rid, temperature=None):
    mode = self.plan[self.requests % len(self.plan)]
    self.requests += 1
    ids, new = list(ids), self.ids() + [0]
    logprobs = (-self.rng.random(len(new))).tolist()
    if mode == "abort":
      return policy.Sampled(new[:-1], logprobs[:-1], self.requests, "abort")
    self.cut = mode == "cut"
    for k, (token, logprob) in enumerate(zip(new, logprobs)):
      self.sampled.append((ids + new[:k], token, np.float32(logprob), self.requests))
    return policy.Sampled(new, logprobs, self.requests, "stop")

  def prompt(self, question):
    return self.ids()

  observation = prompt

  def parse(self, ids):
    self.answered += 1
    if self.answered > self.last:
      return Action("", answer="!")
    return Action("", calls=[types.ToolCall("none", {})])

  def context(self, trajectory, chat):
    return self.ids() if self.cut else None


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    seed=st.integers(0, 2**32), turns=st.integers(0, 8),
    plan=st.lists(st.sampled_from(["abort", "cut", "", ""]), min_size=1, max_size=8).filter(
        lambda plan: set(plan) != {"abort"}),
    pauses=st.lists(st.integers(1, 4), max_size=4))
def test_trained_tokens_are_the_sampled_ones_across_cuts_pauses_and_aborts(
    seed, turns, plan, pauses):
  recorder = Recorder(seed, turns, plan)
  with tempfile.TemporaryDirectory() as folder:
    got, step = [], 0
    while not got:  # each step opens the buffer anew, as another process would
      step += 1
      time = iter(range(10**6))  # asked once to set the deadline, then before each turn
      with buffers.ReplayBuffer(folder + "/buffer.db") as store:
        got = collect(
            [task("t")] if step == 1 else [], store, recorder, step, group_size=1, policy=recorder,
            toolbox=Toolbox([]), chat=recorder, limits=loop.Limits(99, 10**6, 99), concurrency=1,
            grade=lambda t, a: True, clock=lambda: next(time), max_pauses=9,
            run=functools.partial(loop.run, context=recorder.context),
            budget_s=pauses[step - 1] + 1 if step <= len(pauses) else None)
  packed = batch.pack([(got[0], np.ones(len(got[0].turns)), True)], row_tokens=1000)
  trained = []
  for b, t in np.argwhere(packed.mask):
    start = t - packed.positions[b, t]
    trained.append((packed.tokens[b, start:t].tolist(), packed.tokens[b, t],
                    packed.logprobs[b, t], packed.versions[b, t]))
  key = lambda entry: (entry[3], len(entry[0]))
  assert sorted(trained, key=key) == sorted(recorder.sampled, key=key)
