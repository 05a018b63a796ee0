"""What `/generate` accepts, what it refuses by name, and the answer's shape."""

import pytest

from kr.model.request import BadRequest, Request, Result, answer, parse

EOS = frozenset([2])


def one(body):
  requests, batched = parse({"input_ids": [1, 2, 3], **body}, EOS)
  assert not batched
  return requests[0]


def test_defaults_are_those_of_sglang():
  r = one({})
  assert (r.max_new_tokens, r.temperature, r.top_p, r.top_k, r.min_p) == (128, 1.0, 1.0, -1, 0.0)
  assert r.seed is None and r.stop_ids == EOS and r.score_from == -1 and r.rid


def test_settings_arrive():
  r = one({"rid": "x", "return_logprob": True, "logprob_start_len": 1, "sampling_params": {
      "max_new_tokens": 0, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1,
      "sampling_seed": -5, "stop_token_ids": [7, 8], "ignore_eos": True}})
  assert r == Request("x", [1, 2, 3], 0, 0.5, 0.9, 3, 0.1, -5, frozenset([7, 8]), 1)


def test_neutral_values_of_what_is_not_offered_are_accepted():
  r = one({"rid": "x", "stream": False, "session_id": "s", "sampling_params": {
      "frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "n": 1,
      "stop": [], "min_new_tokens": 0, "regex": None, "skip_special_tokens": False,
      "no_stop_trim": True}})
  assert r == one({"rid": "x"})


@pytest.mark.parametrize("name,value", [
    ("frequency_penalty", 0.1), ("presence_penalty", -1), ("repetition_penalty", 1.1),
    ("json_schema", "{}"), ("regex", "a*"), ("ebnf", "root ::= x"), ("logit_bias", {"1": 5}),
    ("stop", ["x"]), ("n", 2), ("min_new_tokens", 3), ("structural_tag", "t"), ("typical_p", 0.5)])
def test_a_setting_that_would_be_ignored_is_refused_by_name(name, value):
  with pytest.raises(BadRequest, match=name):
    one({"sampling_params": {name: value}})


@pytest.mark.parametrize("name,value", [
    ("temperature", -1), ("temperature", float("nan")), ("temperature", "1"), ("temperature", True),
    ("top_p", 0), ("top_p", 1.5), ("top_k", 0), ("top_k", -2), ("top_k", 1.0), ("min_p", 2),
    ("max_new_tokens", -1), ("max_new_tokens", 1.5), ("max_new_tokens", True),
    ("stop_token_ids", "7"), ("stop_token_ids", [True]), ("ignore_eos", 1), ("sampling_seed", "a")])
def test_a_wrong_value_is_refused_by_name(name, value):
  with pytest.raises(BadRequest, match=name):
    one({"sampling_params": {name: value}})


@pytest.mark.parametrize("body,text", [
    ({"input_ids": None}, "input_ids is missing"), ({"input_ids": []}, "empty"),
    ({"input_ids": "1 2"}, "list of integers"), ({"input_ids": [1, "2"]}, "list of integers"),
    ({"input_ids": [1.0]}, "list of integers"), ({"input_ids": [True]}, "list of integers"),
    ({"input_ids": [[1], 2]}, "list of integers"), ({"text": "hello"}, "no tokenizer"),
    ({"stream": True}, "not offered"), ({"rid": 5}, "rid"), ({"rid": ""}, "rid"),
    ({"sampling_params": [1]}, "object"), ({"top_logprobs_num": 3}, "top_logprobs_num"),
    ({"return_logprob": True, "logprob_start_len": 3}, "past the end"),
    ({"return_logprob": 1}, "return_logprob"), ({"lora_path": "x"}, "lora_path")])
def test_a_wrong_body_is_refused(body, text):
  with pytest.raises(BadRequest, match=text):
    one(body)


def test_a_batch_keeps_its_order_and_names():
  requests, batched = parse({"input_ids": [[1], [2, 3]], "rid": "b",
                             "sampling_params": [{"top_k": 1}, {"top_k": 2}]}, EOS)
  assert batched
  assert [(r.rid, r.ids, r.top_k) for r in requests] == [("b_0", [1], 1), ("b_1", [2, 3], 2)]
  requests, _ = parse({"input_ids": [[1], [2]], "rid": ["x", "y"]}, EOS)
  assert [r.rid for r in requests] == ["x", "y"]
  with pytest.raises(BadRequest, match="rid"):
    parse({"input_ids": [[1], [2]], "rid": ["x"]}, EOS)


def test_the_answer_has_sglangs_shape():
  request = Request("x", [4, 5, 6], score_from=1)
  result = Result([7, 8], [-0.5, -1.0], [("1", 0, 1), ("2", 1, 2)], "2",
                  {"type": "stop", "matched": 8}, 2, 1, [-0.25])
  assert answer(request, result) == {"text": "", "output_ids": [7, 8], "meta_info": {
      "id": "x", "finish_reason": {"type": "stop", "matched": 8}, "prompt_tokens": 3,
      "completion_tokens": 2, "cached_tokens": 2, "weight_version": "2", "num_retractions": 1,
      "weight_versions": [{"version": "1", "start": 0, "end": 1},
                          {"version": "2", "start": 1, "end": 2}],
      "output_token_logprobs": [[-0.5, 7, None], [-1.0, 8, None]],
      "input_token_logprobs": [[None, 5, None], [-0.25, 6, None]]}}
