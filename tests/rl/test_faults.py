"""Faults that systems of this kind had, in rollouts, buffer and loop: each is a promise here."""

import asyncio
import contextlib

import numpy as np
import pytest

from kr import types
from kr.agent import loop
from kr.agent.chat import Action
from kr.agent.policy import PolicyError, Sampled
from kr.rl import advantage
from kr.rl import credit
from kr.rl import pool as pools
from kr.rl import rollout
from kr.tools.base import Toolbox, ToolSpec
from kr.types import StopReason
from test_asynchrony import numbered, run
from test_pool import Script, collect, make_pool, names, task


class Words:
  """A chat whose ids are what they say: 1 calls the tool `look`, 2 answers, 0 is a fault."""
  stop_ids = [9]

  def prompt(self, question):
    return [5, 6]

  def observation(self, results):
    return [7] * len(results)

  def parse(self, ids):
    if ids[0] == 1:
      return Action("", calls=[types.ToolCall("look", {})])
    return Action("", answer="!") if ids[0] == 2 else Action("", fault="not_json")


class Turns:
  """A policy that plays a script: ids, an error to raise, a delay, or an abort with its tokens."""

  def __init__(self, *turns):
    self.turns, self.asked, self.version = list(turns), [], 0

  async def generate(self, ids, *, max_new_tokens, stop_ids, rid, temperature=None):
    self.asked.append((list(ids), rid))
    turn = self.turns.pop(0)
    if isinstance(turn, Exception):
      raise turn
    if isinstance(turn, float):
      await asyncio.sleep(turn)
      turn = [2, 9]
    if turn == "abort":
      return Sampled([1, 1, 1], [-9.0] * 3, self.version, "abort")
    return Sampled(turn, [-0.5] * len(turn), self.version, "stop")


class Look:
  spec = ToolSpec("look", "Looks.", {"type": "object", "properties": {}})

  def __init__(self, *delays):
    self.delays, self.closed = list(delays), []

  async def call(self, session_id, arguments):
    await asyncio.sleep(self.delays.pop(0) if self.delays else 0)
    return types.ToolResult("seen")

  async def close(self, session_id):
    self.closed.append(session_id)

  async def aclose(self):
    pass

  def snapshot(self, session_id):
    return None

  def restore(self, session_id, state):
    pass


LIMITS = {"max_turns": 9, "max_context_tokens": 99, "max_turn_tokens": 9}


def play(policy, tool=None, **limits):
  return asyncio.run(loop.run(
      task("t"), policy, Toolbox([tool or Look()]), Words(), loop.Limits(**{**LIMITS, **limits}),
      trajectory_id="f00"))


# ----------------------------------------------------------------------------------- versions


def test_a_version_bump_aborts_no_episode_in_flight(store, script):
  trained, _ = run(store, script, lambda step: numbered(step, turns=30), 5, settle=10,
                   max_staleness=2, concurrency=12)
  assert all(len(step) == 4 for step in trained)
  # Each was begun once, by one call, through however many publications it lived.
  assert len({call[:2] for call in script.calls}) == len(script.calls)
  versions = [rollout.versions(t) for step in range(1, 6) for t in store.all(step)]
  assert max(map(len, versions)) > 1


def test_no_partial_rollout_means_that_no_token_of_another_version_is_trained(store, script):
  _, tokens = run(store, script, lambda step: numbered(step, turns=7), 4, settle=30)
  assert tokens and all(version == step - 1 for step, version in tokens)


def test_a_trained_token_of_another_version_stops_a_strict_run():
  t = types.Trajectory("a", task("a"))
  t.segments.append(types.Segment([1, 2], [0, 1], [0.0, -1.0], [-1, 3]))
  with pytest.raises(AssertionError, match="tokens of policy .3."):
    rollout.assert_on_policy([t], 4)


def test_the_staleness_bound_holds_after_a_kill_and_a_restart(store):
  def tasks_of(step):
    return [task(f"{step}a", 1), task(f"{step}b", 25)] if step <= 9 else []

  async def killed(first, steps):
    """Runs some steps and dies: no trajectory gets to store what it has."""
    script = Script()
    script.version = first - 1
    pool = make_pool(tasks_of, store, script, max_staleness=2, concurrency=9, enough=0.5,
                     max_pauses=2)
    with contextlib.suppress(KeyboardInterrupt):
      async with pool:
        for step in range(first, first + steps):
          got = await pool.collect(step)
          rollout.assert_on_policy(got, step - 1, pool.pace.oldest)
          store.consume([t.id for t in got], step)
          async with pool.publishing():
            script.version = step
        raise KeyboardInterrupt

  asyncio.run(killed(1, 3))
  store.rewind(2)  # the checkpoint of step 3 was not whole
  asyncio.run(killed(3, 3))
  store.rewind(5)
  script = Script()
  script.version = 5
  trained, tokens = run(store, script, tasks_of, 4, first=6, max_staleness=2, concurrency=9,
                        enough=0.5, max_pauses=2)
  assert max(step - 1 - version for step, version in tokens) <= 4
  assert min(step - 1 - version for step, version in tokens) >= 0


# ------------------------------------------------------------------------------------- aborts


def test_an_abort_loses_none_of_the_tokens_that_are_trained_and_trains_none_of_its_own():
  policy = Turns([1, 9], "abort", [1, 3, 9], "abort", "abort", [2, 9])
  t = play(policy)
  assert t.stop is StopReason.ANSWERED and t.meta["aborts"] == 3
  sampled = [x for x, m in zip(t.segments[0].tokens, t.segments[0].mask) if m]
  assert sampled == [1, 9, 1, 3, 9, 2, 9]
  assert -9.0 not in t.segments[0].logprobs


def test_an_abort_is_sampled_again_and_never_counted_as_truncated():
  t = play(Turns("abort", [2, 9]))
  assert (t.stop, t.fault, len(t.turns)) == (StopReason.ANSWERED, None, 1)


def test_no_two_requests_share_an_id_so_none_is_taken_for_one_that_still_runs():
  policy = Turns("abort", [1, 9], [1, 9], "abort", [2, 9])
  play(policy)
  rids = [rid for _, rid in policy.asked]
  assert len(set(rids)) == len(rids) == 5
  assert not any(a != b and a.startswith(b) for a in rids for b in rids)


# ------------------------------------------------------------------------------------- groups


def test_an_excluded_member_leaves_no_group_waiting(store, script):
  script.failures = {"a": 3}
  got = collect([task("a"), task("b")], store, script, concurrency=1)
  assert names(got) == [("a", 1), ("b", 0), ("b", 1)]


def test_a_group_that_lost_all_members_leaves_no_step_waiting(store, script):
  script.failures = {"a": 6}
  got = collect([task("a"), task("b")], store, script, concurrency=1)
  assert names(got) == [("b", 0), ("b", 1)]
  store.consume([t.id for t in got], 1)
  assert names(collect([task("c")], store, script, step=2)) == [("c", 0), ("c", 1)]


def test_a_response_without_tokens_is_excluded_and_leaves_its_group_its_own_baseline(store):
  class Empty(Turns):
    async def generate(self, ids, *, rid, **kwargs):
      if rid.startswith(bad):
        raise PolicyError("returned logprobs of 0 tokens")  # as the client reads an empty answer
      return Sampled([2, 9], [-0.5] * 2, 0, "stop")

  bad = types.trajectory_id(0, 1, "a", 0)
  got = collect([task("a")], store, Script(), group_size=3, policy=Empty(), toolbox=Toolbox([]),
                chat=Words(), limits=loop.Limits(**LIMITS), run=loop.run,
                grade=lambda t, a: len(a) > 0)
  assert names(got) == [("a", 1), ("a", 2)]
  _, advantages, _ = credit.assign(got, gamma=0.9, format_penalty=0.2, negatives_keep=1.0,
                                   protect_faults=True, seed=[0])
  assert np.array_equal(np.concatenate(advantages), [0.0, 0.0])  # both right: no spread


def test_a_trajectory_without_a_turn_enters_no_baseline():
  rewards = [np.zeros(0), np.array([1.0]), np.array([0.0])]
  advantages = advantage.step_advantages(rewards)
  assert [a.tolist() for a in advantages] == [[], [1.0], [-1.0]]


# ------------------------------------------------------------------------------------ resuming


def test_resuming_drops_nothing_skips_no_prompt_and_prefers_none(store):
  """Five processes in a row, each killed in mid-step: what is trained are all tasks, once each."""
  def tasks_of(step):
    turns = {"a": 1, "b": 4, "c": 9, "d": 40} if step < 7 else {}
    return [task(f"{step}{t}", n) for t, n in turns.items()]

  async def life(first, rounds):
    script, trained = Script(), []
    script.version = first - 1

    async def work():
      async with make_pool(tasks_of, store, script, max_staleness=1, enough=0.5, max_pauses=2,
                           concurrency=5) as pool:
        for step in range(first, 10):
          got = await pool.collect(step)
          store.consume([t.id for t in got], step)
          trained.append((step, got))
          script.version = step
    task_ = asyncio.create_task(work())
    for _ in range(rounds):
      await asyncio.sleep(0)
    task_.cancel()
    with contextlib.suppress(asyncio.CancelledError):
      await task_
    return trained

  step, times = 1, {}
  for rounds in (30, 45, 60, 80, 10**4):
    store.rewind(step - 1)
    for done, got in asyncio.run(life(step, rounds)):
      times.update({(t.task.id, t.sample): done for t in got})
      step = done + 1
  everything = {(f"{s}{t}", sample) for s in range(1, 7) for t in "abcd" for sample in range(2)}
  assert set(times) == everything
  assert store.counts() == {"paused": 0, "finished": 48, "excluded": 0, "consumed": 48}
  late = {t: [times[(f"{s}{t}", 0)] - s for s in range(1, 7)] for t in "abcd"}
  assert max(late["d"]) <= 2 and min(late["a"]) >= 0


def test_a_repeated_step_trains_what_it_trained_before_the_kill(store):
  def tasks_of(step):
    return [task(f"{step}a", 1), task(f"{step}b", 30)] if step < 5 else []

  def one_step(step):
    async def main():
      async with make_pool(tasks_of, store, Script(), enough=0.5, concurrency=9) as pool:
        return names(await pool.collect(step))
    return asyncio.run(main())

  first = one_step(1)
  again = one_step(1)  # killed before its checkpoint was whole
  assert first == again == [("1a", 0), ("1a", 1)]
  assert ("1b", 0) in one_step(2)


@pytest.mark.parametrize("long", [3, 6, 12, 30])
def test_a_repeated_step_trains_the_same_where_acting_runs_ahead_too(store, long):
  def tasks_of(step):
    return [task(f"{step}{n}", hops) for n, hops in zip("abcd", (1, 2, long, long + 2))
            ] if step < 6 else []

  def life(*steps):
    async def main():
      out = []
      async with make_pool(tasks_of, store, Script(), enough=0.5, max_staleness=1,
                           concurrency=5) as pool:
        for step in steps:
          got = await pool.collect(step)
          store.consume([t.id for t in got], step)
          out.append(names(got))
        return out
    return asyncio.run(main())

  first = life(1, 2)
  store.rewind(1)  # killed before the checkpoint of step 2 was whole
  assert life(2) == first[1:]


def test_an_excluded_member_that_runs_again_is_waited_for_by_its_group(store, script):
  script.failures = {"a": 3}
  collect([task("a")], store, script, concurrency=1)  # its first sample ends excluded
  ids = [types.trajectory_id(0, 1, "a", sample) for sample in range(2)]
  assert [store.rows(ids)[id].state for id in ids] == ["excluded", "finished"]
  again = types.Trajectory(ids[0], task("a"), 0, stop=StopReason.PAUSED)
  store.begin([again], 1)
  assert [store.rows(ids)[id].state for id in ids] == ["paused", "finished"]
  assert store.finished_unconsumed(1, 2) == []  # not without it


def test_a_repeated_step_trains_without_what_was_excluded_before_the_kill(store, script):
  script.failures = {"a": 3}
  first = collect([task("a"), task("b")], store, script, concurrency=1)
  assert names(first) == [("a", 1), ("b", 0), ("b", 1)]
  store.consume([t.id for t in first], 1)
  store.rewind(0)  # what step 2 sampled already is of the policy that came of these three
  script.calls = []
  assert names(collect([task("a"), task("b")], store, script)) == names(first)
  assert script.calls == []


def test_a_full_buffer_of_finished_trajectories_does_not_block_the_next_start(store, script):
  tasks = [task(str(i)) for i in range(30)]
  collect(tasks, store, script, concurrency=9)  # killed before any was trained
  script.calls = []
  got = collect(tasks, store, script, concurrency=1)
  assert len(got) == 60 and script.calls == []


def test_a_late_result_of_a_trajectory_that_was_run_again_changes_nothing(store, script):
  (first,) = collect([task("a")], store, script, group_size=1)
  late = types.Trajectory.from_json(first.to_json())
  late.answer, late.correct = "another", False
  assert not store.put(late, 2)
  late.stop = StopReason.PAUSED
  assert not store.put(late, 2)
  store.consume([first.id], 1)
  assert not store.put(late, 3)
  assert store.get(first.id).answer == "a" and store.get(first.id).correct


def test_a_rollout_that_somebody_cancels_does_not_leave_its_step_waiting(store, script):
  async def act(task, *args, **kwargs):
    if task.id == "b":
      raise asyncio.CancelledError  # a library's own, swallowed by nobody
    return await script.run(task, *args, **kwargs)

  with pytest.raises(pools.RolloutError, match="cancelled from outside"):
    collect([task("a"), task("b")], store, script, run=act)


# --------------------------------------------------------------------------------- time limits


def test_a_turn_over_its_time_is_infrastructure_and_is_not_sampled_again_in_its_place():
  tool = Look()
  t = play(Turns([1, 9], 60.0), tool, turn_s=0.02)
  assert t.stop is StopReason.INFRASTRUCTURE and "turn_s=0.02" in t.meta["error"]
  assert t.meta["turn_timeouts"] == 1 and len(t.turns) == 1 and tool.closed == ["f00"]


def test_a_call_over_its_time_is_an_observation_and_counted():
  t = play(Turns([1, 9], [2, 9]), Look(60.0), tool_s=0.02)
  assert t.stop is StopReason.ANSWERED and t.meta["tool_timeouts"] == 1
  assert not t.turns[0].results[0].ok and "took longer than 0.02 s" in t.turns[0].results[0].text


@pytest.mark.parametrize("policy, tool", [
    (Turns([1, 9], 60.0), Look()), (Turns([1, 9]), Look(60.0)),
    (Turns(*[[1, 9]] * 9), Look(*[0.02] * 9))], ids=["in a turn", "in a tool", "between turns"])
def test_a_trajectory_over_its_time_ends_with_a_penalty_wherever_it_is(policy, tool):
  t = play(policy, tool, trajectory_s=0.05)
  assert t.stop is StopReason.TIME_LIMIT and t.stop in types.FORMAT_FAULTS
  assert len(t.turns) in (1, 2, 3) and tool.closed == ["f00"]


def test_a_long_tail_blocks_no_step_for_ever(store):
  class Endless(Turns):
    async def generate(self, ids, *, rid, **kwargs):
      await asyncio.sleep(0.005)
      return Sampled([2 if rid.startswith(good) else 1, 9], [-0.5] * 2, 0, "stop")

  good = types.trajectory_id(0, 1, "a", 0)
  got = collect([task("a")], store, Script(), policy=Endless(), toolbox=Toolbox([Look()]),
                chat=Words(), run=loop.run, grade=lambda t, a: True,
                limits=loop.Limits(10**6, 10**6, 9, trajectory_s=0.1))
  assert [t.stop for t in got] == [StopReason.ANSWERED, StopReason.TIME_LIMIT]
