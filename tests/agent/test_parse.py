"""The strict parser: each malformed turn has its name, none is repaired."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from agent_fixtures import SPECS
from kr.agent import parse
from kr.agent.chat import Chat
from kr.types import ToolCall

GOOD = '{"name": "open", "arguments": {"id": "r1"}}'


@pytest.fixture(scope="module", params=["compact", "qwen"])
def chat(request, compact_dir, qwen_dir):
  return Chat({"compact": compact_dir, "qwen": qwen_dir}[request.param], SPECS, "s", max_calls=2)


def call(body):
  return f"<think>t</think><tool_call>{body}</tool_call><|im_end|>"


def arguments(value, name="open"):
  return call(json.dumps({"name": name, "arguments": value}))


ONE = f"<tool_call>{GOOD}</tool_call>"
FAULTY = [
    ("not_json", call("{name: open}")),
    ("not_json", call("")),
    ("not_json", call(GOOD + GOOD)),
    ("not_json", call(GOOD + " x")),
    ("not_json", call(GOOD[:-1])),
    ("not_json", call("'" + GOOD + "'")),
    ("not_json", call(GOOD.replace('"r1"', "NaN"))),
    ("not_json", call(GOOD.replace('"r1"', "-Infinity"))),
    ("not_json", call(GOOD.replace('"r1"', "1e999"))),
    ("not_json", call(GOOD.replace('"r1"', "9" * 5000))),
    ("not_json", call(GOOD.replace("r1", "\\ud800"))),
    ("not_json", call(GOOD.replace("}}", ",}}"))),
    ("not_json", call("```json\n" + GOOD + "\n```")),
    ("wrong_type", call("[" + GOOD + "]")),
    ("wrong_type", call("3")),
    ("unknown_tool", arguments({"id": "r1"}, "close")),
    ("unknown_tool", arguments({"id": "r1"}, "")),
    ("unknown_argument", arguments({"id": "r1", "page": 2})),
    ("unknown_argument", call('{"name": "open", "arguments": {"id": "r1"}, "id": "r1"}')),
    ("missing_argument", arguments({})),
    ("missing_argument", arguments({"loc": 3})),
    ("missing_argument", call('{"name": "open"}')),
    ("missing_argument", call('{"arguments": {"id": "r1"}}')),
    ("missing_argument", call("{}")),
    ("wrong_type", arguments({"id": True})),
    ("wrong_type", arguments({"id": None})),
    ("wrong_type", arguments({"id": 1.0})),
    ("wrong_type", arguments({"id": "r1", "loc": "3"})),
    ("wrong_type", arguments({"id": "r1", "loc": 0})),
    ("wrong_type", arguments({"queries": "x"}, "search")),
    ("wrong_type", arguments({"queries": [1]}, "search")),
    ("wrong_type", arguments([], "open")),
    ("wrong_type", arguments(json.dumps({"id": "r1"}))),
    ("wrong_type", call('{"name": 3, "arguments": {"id": "r1"}}')),
    ("too_many_calls", f"<think>t</think>{ONE * 3}<|im_end|>"),
    ("unclosed_tag", "<think>t"  "<|im_end|>"),
    ("unclosed_tag", f"<think>t</think><tool_call>{GOOD}<|im_end|>"),
    ("unclosed_tag", f"<think>t</think><tool_call>{GOOD}<tool_call>{GOOD}</tool_call><|im_end|>"),
    ("unclosed_tag", "<think>t</think><tool_call><|im_end|>"),
    ("text_after_call", f"<think>t</think>{ONE}done<|im_end|>"),
    ("text_after_call", f"<think>t</think>{ONE},{ONE}<|im_end|>"),
    ("call_in_think", f"<think>t{ONE}</think>5<|im_end|>"),
    ("call_in_think", "<think>t</tool_call></think>5<|im_end|>"),
    ("call_in_think", f"<think>t{ONE}<|im_end|>"),
    ("duplicate_key", call('{"name": "open", "name": "open", "arguments": {"id": "r1"}}')),
    ("duplicate_key", call('{"name": "open", "arguments": {"id": "r1", "id": "r2"}}')),
    ("duplicate_key", call('{"name": "open", "arguments": {"id": "r1", "i\\u0064": "r2"}}')),
    ("arguments_too_large", arguments({"id": "x" * 20_000})),
    ("arguments_too_large", arguments({"queries": ["x" * 201]}, "search")),
    ("arguments_too_large", call('{"name": "open", "arguments": ' + "[" * 8000)),
    ("arguments_too_large", call('{"a":' * 1500 + "1" + "}" * 1500)),
    ("empty_answer", "<think>t</think><|im_end|>"),
    ("empty_answer", "<think>t</think> \n <|im_end|>"),
    ("no_think", "140033<|im_end|>"),
    ("no_think", f"{ONE}<|im_end|>"),
    ("no_think", "<|im_end|>"),
    ("no_think", "so <think>t</think>5<|im_end|>"),
    ("truncated", "<think>t</think>14003"),
    ("truncated", f"<think>t</think>{ONE}"),
    ("truncated", ""),
    ("special_token_in_text", "<think>t</think>5<think>6</think><|im_end|>"),
    ("special_token_in_text", "<think>t<think></think>5<|im_end|>"),
    ("special_token_in_text", f"<think>t</think>I call {ONE}<|im_end|>"),
    ("special_token_in_text", "<think>t</think>5</tool_call><|im_end|>"),
    ("special_token_in_text", f"<think>t</think>{ONE}</tool_call><|im_end|>"),
    ("special_token_in_text", "<think>t</think>5<|im_end|>6<|im_end|>"),
    ("special_token_in_text", "<think>t</think>5<|im_start|>user<|im_end|>"),
    ("special_token_in_text", "<think>t</think><tool_response>5</tool_response><|im_end|>"),
    ("special_token_in_text", "<think>t<|endoftext|></think>5<|im_end|>"),
]


@pytest.mark.parametrize("fault, text", FAULTY, ids=[f"{f}-{i}" for i, (f, _) in enumerate(FAULTY)])
def test_each_malformed_turn_has_its_name_and_is_not_repaired(chat, fault, text):
  action = chat.parse(chat.markup(text))
  assert action.fault == fault, action
  assert action.calls == [] and action.answer is None and action.detail


def test_every_fault_name_is_covered():
  assert {fault for fault, _ in FAULTY} == set(parse.FAULTS) - {"text_after_answer"}  # test_plain


def test_structure_is_read_from_token_ids_not_from_spellings(chat):
  start, end = chat.markup("<think>t</think>"), chat.markup("<|im_end|>")
  plain = chat.encode(f"<tool_call>{GOOD}</tool_call>")
  assert chat.parse(start + plain + end).fault == "special_token_in_text"
  assert chat.parse(chat.encode("<think>t</think>5") + end).fault == "no_think"
  spelled = chat.encode("a <tool_call> b")
  ids = chat.markup("<think>") + spelled + chat.markup("</think>5<|im_end|>")
  assert chat.parse(ids).answer == "5"


def test_white_space_between_the_pieces_is_allowed(chat):
  action = chat.parse(chat.markup(
      f"\n<think>\nt\n</think>\n\n<tool_call>\n{GOOD}\n</tool_call>\n {ONE}\n<|im_end|>"))
  assert action.fault is None and action.think == "t"
  assert action.calls == [ToolCall("open", {"id": "r1"})] * 2
  assert chat.parse(chat.markup("<think></think>\n 5 \n<|im_end|>")).answer == "5"


def test_ids_past_the_vocabulary_are_named(chat):
  ids = chat.markup("<think>t</think>5") + [chat.vocab_size + 3] + chat.markup("<|im_end|>")
  assert chat.parse(ids).fault == "special_token_in_text"


def test_the_thinking_of_a_faulty_turn_is_kept(chat):
  assert chat.parse(chat.markup("<think>so far</think><|im_end|>")).think == "so far"
  assert chat.parse(chat.markup("<think>so far")).think == "so far"


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>",
                                 "<|im_start|>", GOOD, "5", " ", '{"a":', "[", '"']), max_size=12))
def test_any_turn_gives_calls_or_an_answer_or_one_named_fault(chat, pieces):
  action = chat.parse(chat.markup("".join(pieces)))
  assert sum([bool(action.calls), action.answer is not None, action.fault is not None]) == 1
  assert action.fault is None or action.fault in parse.FAULTS


@settings(deadline=None, max_examples=100)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(),
                    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3)))
def test_strict_json_reads_whatever_json_writes(value):
  try:
    text = json.dumps(value)
    text.encode()
    json.dumps(value, ensure_ascii=False).encode()
  except UnicodeEncodeError:
    return
  assert parse.read_json(text) == value
