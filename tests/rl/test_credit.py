"""From outcomes to advantages, over a group worked out by hand."""

from kr import types
from kr.rl import credit

TASK = types.Task("a", "q", "1", "k")


def trajectory(name, turns, stop=types.StopReason.ANSWERED, correct=None):
  return types.Trajectory(name, TASK, stop=stop, correct=correct, meta={"step_made": 1},
                          turns=[types.Turn(0, 0, 1, 0)] * turns)


def test_credit_of_a_group_by_hand():
  group = [trajectory("right", 2, correct=True), trajectory("wrong", 1, correct=False)]
  rewards, advantages, keep = credit.assign(
      group, gamma=0.5, format_penalty=0.2, negatives_keep=0.0, protect_faults=True, seed=[0, 1])
  # Rewards 0.5 1 | 0. Baselines, each the other's mean: 0 and 0.75.
  assert [r.tolist() for r in rewards] == [[0.5, 1.0], [0.0]]
  assert [a.tolist() for a in advantages] == [[0.5, 1.0], [-0.75]]
  assert keep.tolist() == [True, False]  # no negative sample is kept


def test_protected_faults_train_though_no_negative_sample_is_kept():
  group = [trajectory("right", 1, correct=True),
           trajectory("fault", 1, stop=types.StopReason.INVALID_ACTION)]
  keep = lambda protect: credit.assign(
      group, gamma=1.0, format_penalty=0.2, negatives_keep=0.0, protect_faults=protect,
      seed=[0])[2].tolist()
  assert keep(True) == [True, True]
  assert keep(False) == [True, False]
