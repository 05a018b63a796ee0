"""Counts by formula, against published sizes and by hand."""

import dataclasses

import pytest

from kr.model import cost
from kr.model.config import ModelConfig, MoeConfig

SMALL = ModelConfig(vocab=100, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp=16)
# wq 8·8, wk and wv 8·4, wo 8·8, gate, up and down 8·16, in 2 layers
MATRICES = 2 * (64 + 32 + 32 + 64 + 3 * 128)


def test_parameters_by_hand():
  norms = 2 * (8 + 8 + 4 + 4) + 8
  assert cost.active_parameters(SMALL) == (MATRICES, 800)
  assert cost.total_parameters(SMALL) == MATRICES + norms + 800  # tied: one table


def test_a_token_visits_its_experts_only():
  experts = ModelConfig(vocab=100, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp=16,
                        moe=MoeConfig(experts=8, active=2, mlp=6, layers=(0, 1), shared=1))
  attention = 2 * (64 + 32 + 32 + 64)
  assert cost.active_parameters(experts)[0] == attention + 2 * (8 * 8 + (2 + 1) * 3 * 8 * 6)


def test_flops_by_hand():
  # A segment of 10: query i sees i + 1 keys, on average about half; 2 layers, 2 heads of 4 + 4.
  attention = 2 * 2 * (4 + 4) * 2 * (10 / 2)
  forward = 2 * MATRICES + attention
  assert cost.step_flops(SMALL, 30, 10, 5) == pytest.approx(30 * 3 * forward + 5 * 6 * 800)
  assert cost.step_flops(SMALL, 30, 10, 5, again=1.0) == pytest.approx(
      30 * 4 * forward + 5 * 6 * 800)


def test_a_window_shortens_attention():
  windowed = dataclasses.replace(SMALL, window=4, window_layers=(0, 1))
  pairs = 4 * (1 - 4 / 100 / 2)
  assert cost.step_flops(windowed, 1, 100, 0) == pytest.approx(
      3 * (2 * MATRICES + 2 * 2 * 8 * 2 * pairs))


def test_bytes_by_hand():
  inputs_and_outputs = 2 * ((8 + 8) + 2 * (8 + 4) + (8 + 8) + 2 * (8 + 16) + (16 + 8))
  one = cost.step_bytes(SMALL, 30, 5, 2, {}, 4)
  assert one == 4 * 3 * (2 * MATRICES + 30 * inputs_and_outputs + 2 * 800 + 5 * 108)
  # tensor=2 halves all but the one key and value head, which cannot be halved
  half = cost.step_bytes(SMALL, 0, 0, 1, {"tensor": 2}, 4)
  assert half == 4 * 3 * (2 * (32 + 32 + 32 + 32 + 3 * 64) + 400)


@pytest.mark.parametrize("group, bandwidth", [
    ((0, 1, 7), "link_bandwidth"), ((8, 15), "link_bandwidth"), ((0, 8), "outside_bandwidth")])
def test_what_leaves_a_server_of_eight_is_slower(group, bandwidth):
  chip = cost.CHIPS["h100"]
  assert cost.link_bandwidth(chip, group) == getattr(chip, bandwidth)
