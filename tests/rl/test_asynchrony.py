"""Acting runs ahead of learning, ends early, and neither mixes nor loses a turn."""

import asyncio
import gc

import pytest

from kr import types
from kr.rl import metrics
from kr.rl import pool as pools
from kr.rl import rollout
from kr.types import StopReason
from test_pool import Script, make_pool, names, task


def numbered(step, turns=1, count=2):
  return [task(f"{step}{'abcd'[i]}", turns) for i in range(count)]


async def train(pool, script, store, steps, first=1, settle=20):
  """The trainer's loop around a pool, with a learner that takes `settle` rounds of the event loop.

  Returns the names that each step trained, and (step, version) of every token trained.
  """
  trained, tokens = [], []
  for step in range(first, first + steps):
    got = await pool.collect(step)
    rollout.assert_on_policy(got, step - 1, pool.pace.oldest)
    for _ in range(settle):
      await asyncio.sleep(0)
    store.consume([t.id for t in got], step)
    async with pool.publishing():
      script.version = step
    trained.append(names(got))
    tokens += [(step, v) for t in got for s in t.segments for v, m in zip(s.versions, s.mask) if m]
  return trained, tokens


def run(store, script, tasks_of, steps, first=1, settle=20, **kwargs):
  async def main():
    async with make_pool(tasks_of, store, script, **kwargs) as pool:
      return await train(pool, script, store, steps, first, settle)
  return asyncio.run(main())


def test_acting_goes_on_while_the_learner_learns_and_steps_train_their_own_tasks(store, script):
  trained, tokens = run(store, script, numbered, 4, max_staleness=1, concurrency=4)
  assert trained == [[(f"{n}{t}", s) for t in "ab" for s in range(2)] for n in range(1, 5)]
  assert {step - 1 - version for step, version in tokens} == {0, 1}
  # Step 2's trajectories were there before policy 1 was: none of them waited for the learner.
  assert [v for step, v in tokens if step == 2] == [0] * 4


def test_at_staleness_0_nothing_acts_while_the_learner_learns(store, script):
  acting = []

  async def main():
    async with make_pool(numbered, store, script) as pool:
      for step in (1, 2):
        got = await pool.collect(step)
        before = len(script.calls)
        for _ in range(50):
          await asyncio.sleep(0)
        acting.append((script.running, len(script.calls) - before))
        rollout.assert_on_policy(got, script.version)
        store.consume([t.id for t in got], step)
        async with pool.publishing():
          script.version = step

  asyncio.run(main())
  assert acting == [(0, 0), (0, 0)]


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("partial", [{}, {"enough": 0.5, "max_pauses": 2}],
                         ids=["whole", "partial"])
def test_no_trained_token_is_older_than_the_bound(store, script, staleness, partial):
  def tasks_of(step):
    return [task(f"{step}a", 1), task(f"{step}b", 40)] if step <= 8 else []
  trained, tokens = run(store, script, tasks_of, 8, settle=5, max_staleness=staleness,
                        concurrency=6, **partial)
  oldest = staleness + partial.get("max_pauses", 0)
  assert 0 < max(step - 1 - version for step, version in tokens) <= oldest
  once = [name for step in trained for name in step]
  assert len(once) == len(set(once))


def test_a_step_takes_what_is_complete_when_enough_is_and_the_rest_comes_later(store, script):
  def tasks_of(step):
    return [task(f"{step}a", 2), task(f"{step}b", 9)] if step == 1 else [task(f"{step}a", 2)]
  trained, tokens = run(store, script, tasks_of, 2, enough=0.5, concurrency=9)
  assert trained[0] == [("1a", 0), ("1a", 1)]
  assert ("1b", 0) in trained[1] and ("1b", 1) in trained[1]
  assert (2, 0) in tokens and (2, 1) in tokens  # two policies, each turn by one
  resumed = [call for call in script.calls if call[2]]
  assert [call[:2] for call in resumed] == [("1b", 0), ("1b", 1)]
  assert script.calls.index(resumed[-1]) < script.calls.index(("2a", 0, None))  # they go first


def test_what_was_paused_max_pauses_times_is_waited_for_and_not_dropped(store, script):
  def tasks_of(step):
    return [task(f"{step}a", 1), task(f"{step}b", 60 if step == 1 else 1)]
  trained, _ = run(store, script, tasks_of, 4, enough=0.5, max_pauses=2, concurrency=9)
  when = [n for n, step in enumerate(trained, 1) if ("1b", 0) in step]
  assert when == [3]  # paused at the end of steps 1 and 2, step 3 waits for it
  assert len(script.calls) == len(set((c[0], c[1]) for c in script.calls)) + 2 * 2


def test_the_budget_ends_a_step_while_acting_goes_on(store, script):
  async def main():
    release = asyncio.Event()

    async def act(task, *args, **kwargs):
      if task.id.endswith("b"):
        await release.wait()
      return await script.run(task, *args, **kwargs)

    async with make_pool(numbered, store, script, run=act, max_staleness=1, concurrency=8,
                         budget_s=0.05) as pool:
      first = await pool.collect(1)
      release.set()
      return names(first), names(await pool.collect(2)), pool.take_counts()

  first, second, counts = asyncio.run(main())
  assert first == [("1a", 0), ("1a", 1)]
  assert [("1b", 0), ("1b", 1)] == [n for n in second if n[0] == "1b"]
  assert counts["paused"] == 2


def test_publishing_waits_for_turns_and_lets_tools_go_on():
  async def main():
    gate, log, tool = pools.Gate(), [], asyncio.Event()

    async def trajectory(name, turns):
      for turn in range(turns):
        async with gate.turn():
          log.append(f"{name}{turn} begins")
          await asyncio.sleep(0.01)
          log.append(f"{name}{turn} ends")
        await tool.wait()

    work = asyncio.gather(trajectory("x", 2), trajectory("y", 2))
    await asyncio.sleep(0)
    async with gate.shut():
      log.append("publish")
      tool.set()
      await asyncio.sleep(0.03)
      log.append("published")
    await work
    return log

  log = asyncio.run(main())
  assert log[:6] == ["x0 begins", "y0 begins", "x0 ends", "y0 ends", "publish", "published"]
  assert sorted(log[6:]) == ["x1 begins", "x1 ends", "y1 begins", "y1 ends"]


def test_no_turn_spans_a_publication_however_they_meet(store, script):
  spans = []

  class Slow(Script):
    async def turns(self, result, should_pause, gate):
      for turn in range(result.task.hops):
        async with gate():
          before = self.version
          for _ in range(1 + hash((result.id, turn)) % 7):
            await asyncio.sleep(0)
          spans.append((before, self.version))
          result.segments[0].append_sampled([2], [-0.5], self.version)
          result.turns.append(types.Turn(0, turn + 1, turn + 2, self.version))
      result.answer = result.task.id
      return StopReason.ANSWERED

  slow = Slow()
  run(store, slow, lambda step: numbered(step, turns=5), 6, settle=3, max_staleness=2,
      concurrency=8)
  assert {before for before, _ in spans} >= {0, 1, 2}
  assert all(before == after for before, after in spans)


def test_grading_holds_no_place_and_a_slow_judge_delays_its_own_step_alone(store, script):
  async def main():
    verdict, asked = asyncio.Event(), []

    async def judge(task, answer):
      asked.append(task.id)
      await verdict.wait()
      return answer == task.answer

    async with make_pool(lambda step: [task("a"), task("b"), task("c")], store, script,
                         grade=judge, concurrency=1, group_size=1) as pool:
      work = asyncio.create_task(pool.collect(1))
      while len(asked) < 3:
        await asyncio.sleep(0)
      done = work.done()
      verdict.set()
      return done, await work

  done, got = asyncio.run(main())
  assert not done and script.most_running == 1
  assert [t.correct for t in got] == [True] * 3


def test_a_bug_between_two_steps_is_raised_by_the_next_one(store, script):
  def bug(task, turn):
    if task.id == "2a":
      raise ZeroDivisionError("in the background")
  script.before_turn = bug

  async def main():
    async with make_pool(numbered, store, script, max_staleness=1, concurrency=4) as pool:
      got = await pool.collect(1)
      for _ in range(50):
        await asyncio.sleep(0)
      await pool.collect(2)
      return got

  with pytest.raises(ZeroDivisionError, match="in the background"):
    asyncio.run(main())


def test_leaving_stores_what_runs_and_the_same_step_goes_on_from_there(store, script):
  async def main():
    async with make_pool(lambda step: [task("a", 50)], store, script, group_size=1) as pool:
      work = asyncio.create_task(pool.collect(1))
      for _ in range(20):
        await asyncio.sleep(0)
      pool.leave()
      with pytest.raises(pools.Left, match="the same command goes on"):
        await work

  asyncio.run(main())
  (paused,) = store.paused(1)
  assert 0 < len(paused.turns) < 50
  trained, _ = run(store, script, lambda step: [task("a", 50)], 1, group_size=1)
  assert trained == [[("a", 0)]] and script.calls[-1] == ("a", 0, len(paused.turns))


def test_leaving_the_last_step_keeps_what_it_did_not_wait_for(store, script):
  trained, _ = run(store, script, lambda step: [task(f"{step}a", 1), task(f"{step}b", 30)], 1,
                   enough=0.5, max_staleness=1, concurrency=9)
  assert trained == [[("1a", 0), ("1a", 1)]]
  assert store.counts()["paused"] + store.counts()["finished"] >= 8
  assert {t.task.id for t in store.paused(2)} >= {"1b"}


def test_a_pool_makes_full_garbage_collections_rare_and_leaves_the_collector_as_it_was(
    store, script):
  before, within = gc.get_threshold(), []
  script.before_turn = lambda task, turn: within.append(gc.get_threshold())
  run(store, script, numbered, 1)
  assert gc.get_threshold() == before
  assert {t[:2] for t in within} == {before[:2]} and all(t[2] > before[2] for t in within)


@pytest.mark.parametrize("pace, said", [
    ({"concurrency": 0}, "concurrency must be positive"), ({"max_staleness": -1}, "max_staleness"),
    ({"enough": 0.0}, "share of the groups"), ({"enough": 1.5}, "share of the groups"),
    ({"budget_s": -1.0}, "budget_s"), ({"max_pauses": 0}, "max_pauses must be at least 1")])
def test_a_pace_that_cannot_be_is_refused(pace, said):
  with pytest.raises(ValueError, match=said):
    pools.Pace(**{"concurrency": 1, **pace})


def test_metrics_tell_how_old_the_trained_tokens_are():
  def trajectory(*versions):
    t = types.Trajectory("x", types.Task("t", "?", "!", "k"), segments=[types.Segment()])
    t.segments[0].append_context([1])
    for version in versions:
      t.segments[0].append_sampled([2], [-1.0], version)
    return t
  assert metrics.staleness([trajectory(3, 3), trajectory(1, 3), trajectory()], 3) == {
      "stale": 1, "staleness": 0.5, "staleness_max": 2}
  assert metrics.staleness([], 3) == {"stale": 0, "staleness": 0.0, "staleness_max": 0}
