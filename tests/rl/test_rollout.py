import pytest

from kr import types
from kr.rl import rollout


def test_tasks_of_a_step_are_a_seeded_walk_that_visits_every_task_once_an_epoch():
  tasks = [types.Task(str(i), "q", "a", "k") for i in range(6)]
  pick = lambda seed, step: [t.id for t in rollout.pick_tasks(tasks, seed, step, 2)]
  first = pick(0, 1) + pick(0, 2) + pick(0, 3)
  assert sorted(first) == [str(i) for i in range(6)]
  assert first == pick(0, 1) + pick(0, 2) + pick(0, 3)  # the same after a restart
  assert first != pick(1, 1) + pick(1, 2) + pick(1, 3)
  assert sorted(pick(0, 4) + pick(0, 5) + pick(0, 6)) == sorted(first)  # the next epoch


def test_a_token_of_another_policy_is_not_on_policy():
  t = types.Trajectory("a", types.Task("a", "q", "a", "k"), segments=[types.Segment()])
  t.segments[0].append_context([1])
  t.segments[0].append_sampled([2], [-1.0], 4)
  rollout.assert_on_policy([t], 4)
  with pytest.raises(AssertionError, match="policy .4."):
    rollout.assert_on_policy([t], 5)


def test_a_token_older_than_is_allowed_is_refused_and_one_of_the_future_always():
  t = types.Trajectory("a", types.Task("a", "q", "a", "k"), segments=[types.Segment()])
  t.segments[0].append_context([1])
  t.segments[0].append_sampled([2], [-1.0], 3)
  t.segments[0].append_sampled([2], [-1.0], 4)
  rollout.assert_on_policy([t], 4, oldest=1)
  for version, odd in (3, 4), (5, 3):
    with pytest.raises(AssertionError, match=f"tokens of policy .{odd}."):
      rollout.assert_on_policy([t], version, oldest=1)
