"""What kr adds to SGLang-JAX's answers; the server itself is in tests/agent/test_contract.py."""

import importlib.util
import pathlib

PATH = pathlib.Path(__file__).resolve().parent.parent / "launch" / "sglang_jax" / "versions.py"
spec = importlib.util.spec_from_file_location("sglang_jax_versions", PATH)
versions = importlib.util.module_from_spec(spec)
spec.loader.exec_module(versions)


def span(version, start, end):
  return {"version": version, "start": start, "end": end}


def test_each_token_is_of_the_version_that_was_served_when_it_was_sampled():
  v = versions.Versions("0")
  v.begin("a")
  v.begin("b")
  v.change("1", {"a": 4, "b": 0})
  v.begin("c")
  v.change("2", {"a": 4, "c": 7})
  assert v.spans("a", 9) == [span("0", 0, 4), span("2", 4, 9)]  # Nothing was sampled under 1.
  assert v.spans("b", 5) == [span("1", 0, 5)]  # It ended before 2 came.
  assert v.spans("c", 7) == [span("1", 0, 7)]
  assert v.current == "2"


def test_a_request_without_tokens_has_no_spans_and_the_current_version():
  v = versions.Versions("3")
  v.begin("a")
  answer = {"output_ids": [], "meta_info": {"id": "a", "completion_tokens": 0}}
  versions.complete(answer, v)
  assert answer["meta_info"]["weight_versions"] == []
  assert answer["meta_info"]["weight_version"] == "3"


def test_tokens_that_the_engine_says_twice_are_taken_out():
  """After 50 tokens it has sent them on once: of 52, the entries are 50 and then all 52."""
  v = versions.Versions("1")
  v.begin("a")
  whole = [[-0.5, token, None] for token in range(52)]
  answer = {"output_ids": list(range(52)), "meta_info": {
      "id": "a", "completion_tokens": 52, "output_token_logprobs": whole[:50] + whole}}
  versions.complete(answer, v)
  assert answer["meta_info"]["output_token_logprobs"] == whole
  assert answer["output_ids"] == list(range(52))
  assert answer["meta_info"]["weight_versions"] == [span("1", 0, 52)]


def test_what_a_finished_request_was_sampled_by_is_forgotten():
  v = versions.Versions("1")
  v.begin("a")
  v.spans("a", 3)
  v.change("2", {})
  v.begin("a")
  assert v.spans("a", 3) == [span("2", 0, 3)]
