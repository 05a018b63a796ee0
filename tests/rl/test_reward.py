import numpy as np
import pytest

from kr.rl import reward
from kr.types import StopReason


def test_correct_answer_decays_from_the_last_step_backwards():
  np.testing.assert_allclose(
      reward.step_rewards(StopReason.ANSWERED, True, 4, 0.5, 1.0), [0.125, 0.25, 0.5, 1.0])


def test_gamma_one_rewards_every_step_alike():
  np.testing.assert_array_equal(
      reward.step_rewards(StopReason.ANSWERED, True, 3, 1.0, 0.0), [1, 1, 1])


def test_shorter_correct_trajectory_earns_more_per_step():
  short = reward.step_rewards(StopReason.ANSWERED, True, 2, 0.9, 0).mean()
  long = reward.step_rewards(StopReason.ANSWERED, True, 3, 0.9, 0).mean()
  assert short == pytest.approx(0.95) and long == pytest.approx(2.71 / 3)


def test_wrong_answer_gives_zeros():
  np.testing.assert_array_equal(
      reward.step_rewards(StopReason.ANSWERED, False, 3, 0.9, 0.5), [0, 0, 0])


@pytest.mark.parametrize(
    "stop", [StopReason.MAX_TURNS, StopReason.CONTEXT_OVERFLOW, StopReason.INVALID_ACTION])
def test_format_fault_is_penalised_flat_whatever_the_grade(stop):
  for correct in (None, True, False):
    np.testing.assert_array_equal(
        reward.step_rewards(stop, correct, 3, 0.5, 0.25), [-0.25, -0.25, -0.25])
  assert reward.step_rewards(stop, None, 0, 0.5, 0.25).shape == (0,)


@pytest.mark.parametrize("stop", [StopReason.PAUSED, StopReason.INFRASTRUCTURE, None])
def test_unscorable_stops_raise(stop):
  with pytest.raises(ValueError, match="has no reward"):
    reward.step_rewards(stop, False, 3, 0.9, 0.5)


@pytest.mark.parametrize("arguments, message", [
    ((StopReason.ANSWERED, None, 2, 0.9, 0.5), "not graded"),
    ((StopReason.ANSWERED, True, 0, 0.9, 0.5), "at least one turn"),
    ((StopReason.ANSWERED, True, 2, 0.0, 0.5), "gamma"),
    ((StopReason.ANSWERED, True, 2, 1.1, 0.5), "gamma"),
    ((StopReason.ANSWERED, True, 2, 0.9, -0.5), "format_penalty"),
    ((StopReason.ANSWERED, True, -1, 0.9, 0.5), "turns"),
])
def test_bad_arguments_raise(arguments, message):
  with pytest.raises(ValueError, match=message):
    reward.step_rewards(*arguments)
