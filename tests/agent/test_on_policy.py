"""The on-policy guard names what changes the distribution, and lets the rest pass."""

import pytest

from kr.agent import on_policy


@pytest.mark.parametrize("setting, value", [
    ("temperature", 0.7), ("temperature", 0), ("top_p", 0.95), ("top_k", 20), ("min_p", 0.05),
    ("frequency_penalty", 0.1), ("presence_penalty", -0.5), ("repetition_penalty", 1.05),
    ("min_new_tokens", 5), ("json_schema", "{}"), ("regex", "[a-z]+"), ("ebnf", "root ::= x"),
    ("structural_tag", "x"), ("logit_bias", {"5": 1.0}), ("stop", ["\n"]), ("sampling_seed", 3)])
def test_a_sampling_setting_that_changes_the_distribution_is_named_with_its_value(setting, value):
  fault = on_policy.sampling_fault({"temperature": 1.0, setting: value})
  assert f"{setting}={value!r}" in fault and "on-policy training needs" in fault


@pytest.mark.parametrize("sampling", [
    {}, {"temperature": 1}, dict(on_policy.NEUTRAL), {"regex": None, "stop": []}])
def test_neutral_sampling_settings_pass(sampling):
  assert on_policy.sampling_fault(sampling) is None


@pytest.mark.parametrize("setting, value", [
    ("tool_call_parser", "qwen25"), ("reasoning_parser", "qwen3"),
    ("preferred_sampling_params", {"top_p": 0.9}), ("preferred_sampling_params", '{"top_k": 20}'),
    ("speculative_algorithm", "EAGLE"), ("grammar", "root ::= x"), ("json_schema", "{}"),
    ("enable_deterministic_inference", True), ("enable_watermark", True),
    ("allow_auto_truncate", True)])
def test_a_server_setting_that_is_refused_is_named_with_its_remedy(setting, value):
  fault = on_policy.server_fault({setting: value})
  assert f"{setting}={value!r}" in fault and "start the server without" in fault


def test_sglangs_defaults_pass():
  assert on_policy.server_fault({
      "grammar_backend": "xgrammar", "sampling_defaults": "model", "tool_call_parser": None,
      "reasoning_parser": None, "preferred_sampling_params": None, "speculative_algorithm": None,
      "enable_deterministic_inference": False, "enable_custom_logit_processor": False,
      "allow_auto_truncate": False, "weight_version": "default"}) is None


def test_logprobs_that_are_not_the_models_own_are_noticed():
  assert on_policy.logprob_fault([-1.0, -2.0], [-1.0005, -1.9995], 1e-3) is None
  # (0.5 + 0.1) / 2 = 0.3
  assert "by 0.3 on average" in on_policy.logprob_fault([-1.0, -2.0], [-1.5, -2.1], 1e-3)
  assert on_policy.logprob_fault([float("nan")], [-1.0], 1e-3)
