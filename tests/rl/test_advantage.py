import numpy as np
import pytest

from kr.rl import advantage


def test_baseline_is_the_mean_of_the_others():
  np.testing.assert_allclose(advantage.baseline([1.0, 0.0, 0.5]), [0.25, 0.75, 0.5])


def test_baseline_of_one_is_zero():
  np.testing.assert_array_equal(advantage.baseline([0.7]), [0.0])
  np.testing.assert_array_equal(advantage.baseline([]), [])


def test_step_advantages_by_hand():
  # means 0.75, 0, -0.5 -> baselines -0.25, 0.125, 0.375
  rewards = [np.array([0.5, 1.0]), np.zeros(3), np.array([-0.5])]
  a, b, c = advantage.step_advantages(rewards)
  np.testing.assert_allclose(a, [0.75, 1.25])
  np.testing.assert_allclose(b, [-0.125] * 3)
  np.testing.assert_allclose(c, [-0.875])


def test_group_of_one_keeps_its_reward():
  np.testing.assert_allclose(advantage.step_advantages([np.array([0.5, 1.0])])[0], [0.5, 1.0])


def test_group_without_spread_has_zero_advantage():
  rewards = [np.array([0.5, 1.0]), np.array([0.5, 1.0])]
  assert not advantage.has_spread(rewards)
  for a in advantage.step_advantages(rewards):
    np.testing.assert_array_equal(a, [0, 0])
  assert advantage.has_spread([np.array([0.5, 1.0]), np.zeros(2)])


def test_trajectory_without_turns_enters_no_baseline():
  a, empty, c = advantage.step_advantages([np.ones(1), np.zeros(0), np.zeros(2)])
  np.testing.assert_allclose(a, [1.0])
  assert empty.shape == (0,)
  np.testing.assert_allclose(c, [-1.0, -1.0])
  assert not advantage.has_spread([np.zeros(0)])


def test_negative_sample_control_discards_the_share_of_the_negatives_only():
  advantages = (
      [np.array([1.0])] * 3 + [np.array([0.5, -1.5])] * 10 + [np.zeros(2)] * 4 + [np.zeros(0)])
  keep = advantage.negative_sample_control(advantages, 0.7, np.random.default_rng(0))
  assert keep[:3].all() and keep[13:].all()
  assert (~keep[3:13]).sum() == 3


def test_negative_sample_control_is_a_function_of_the_generator():
  advantages = [np.array([-1.0])] * 20
  masks = [advantage.negative_sample_control(advantages, 0.5, np.random.default_rng(seed))
           for seed in (1, 1, 2)]
  np.testing.assert_array_equal(masks[0], masks[1])
  assert (masks[0] != masks[2]).any()


def test_negative_sample_control_rounds_half_up_and_reaches_both_ends():
  advantages = [np.array([-1.0])] * 5
  rng = np.random.default_rng(0)
  discarded = lambda keep: (~advantage.negative_sample_control(advantages, keep, rng)).sum()
  assert [discarded(keep) for keep in (1, 0.9, 0.7, 0)] == [0, 1, 2, 5]


def test_protected_trajectories_are_never_discarded():
  advantages = [np.array([-1.0])] * 6
  protected = [True, False, True, False, False, False]
  keep = advantage.negative_sample_control(advantages, 0.5, np.random.default_rng(0), protected)
  assert keep[0] and keep[2] and (~keep).sum() == 2  # half of the four that are not protected


def test_keep_out_of_range_raises():
  with pytest.raises(ValueError, match="keep"):
    advantage.negative_sample_control([], 1.5, np.random.default_rng(0))
