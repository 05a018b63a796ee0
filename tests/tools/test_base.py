"""Argument checks and the toolbox: every failure is something the policy can read."""

import asyncio

import hypothesis
from hypothesis import strategies as st
import pytest

from kr.tools import base
from kr.types import ToolCall, ToolResult

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["queries"],
    "properties": {
        "queries": {"type": "array", "minItems": 1, "maxItems": 2,
                    "items": {"type": "string", "maxLength": 3}},
        "id": {"type": ["string", "integer"], "minimum": 1},
        "share": {"type": "number"},
        "mode": {"type": "string", "enum": ["a", "b"]},
        "deep": {"type": "object", "required": ["x"], "properties": {"x": {"type": "null"}}}}}


@pytest.mark.parametrize("arguments, wrong", [
    ({"queries": ["abc"]}, None),
    ({"queries": ["a", "b"], "id": 1, "share": 1, "mode": "b", "deep": {"x": None}}, None),
    ({"queries": ["a"], "id": "x", "share": 0.5}, None),
    ({}, "missing argument: 'queries'"),
    ({"queries": ["a"], "loc": 1}, "unknown argument: 'loc'"),
    ({"queries": "a"}, "wrong type: queries must be array"),
    ({"queries": [1]}, "wrong type: queries[0] must be string"),
    ({"queries": ["a", None]}, "wrong type: queries[1] must be string"),
    ({"queries": []}, "too short: queries has 0 items, at least 1 are needed"),
    ({"queries": ["a"] * 3}, "too long: queries has 3 items, at most 2 are allowed"),
    ({"queries": ["abcd"]}, "too long: queries[0] has 4 characters, at most 3 are allowed"),
    ({"queries": ["a"], "id": True}, "wrong type: id must be string or integer"),
    ({"queries": ["a"], "id": 1.0}, "wrong type: id must be string or integer"),
    ({"queries": ["a"], "id": 0}, "too small: id must be at least 1"),
    ({"queries": ["a"], "share": float("nan")}, "wrong type: share must be number"),
    ({"queries": ["a"], "share": False}, "wrong type: share must be number"),
    ({"queries": ["a"], "mode": "c"}, "wrong value: mode must be one of 'a', 'b'"),
    ({"queries": ["a"], "deep": {}}, "missing argument: 'deep.x'"),
    ({"queries": ["a"], "deep": {"x": None, "y": 1}}, "unknown argument: 'deep.y'"),
    ([], "wrong type: arguments must be object"),
    (None, "wrong type: arguments must be object"),
])
def test_arguments_are_checked_strictly(arguments, wrong):
  assert base.validate(arguments, SCHEMA) == wrong


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["queries", "id", "share", "deep", "x"]) | st.text(), inner, max_size=4))


@hypothesis.given(JSON)
def test_no_json_value_makes_the_check_raise(value):
  wrong = base.validate(value, SCHEMA)
  assert wrong is None or isinstance(wrong, str)


def test_a_deeply_nested_value_is_refused_without_recursion():
  value = []
  for _ in range(100_000):
    value = [value]
  assert base.validate({"queries": value}, SCHEMA) == "wrong type: queries[0] must be string"


class _Echo:
  """A tool that does what its argument says."""
  spec = base.ToolSpec("echo", "", {"type": "object", "required": ["do"],
                                    "properties": {"do": {"type": "string"}}})

  def __init__(self):
    self.state = {}

  async def call(self, session_id, arguments):
    if arguments["do"] == "hang":
      await asyncio.sleep(60)
    if arguments["do"] == "crash":
      raise RuntimeError("broken inside")
    self.state[session_id] = arguments["do"]
    return ToolResult(arguments["do"])

  async def close(self, session_id):
    self.state.pop(session_id, None)

  async def aclose(self):
    self.state.clear()

  def snapshot(self, session_id):
    return {"do": self.state[session_id]} if session_id in self.state else None

  def restore(self, session_id, state):
    self.state[session_id] = state["do"]


@pytest.mark.parametrize("name, arguments, text", [
    ("echo", {"do": "hang"}, "echo timed out after 0.05 s"),
    ("echo", {"do": "crash"}, "echo failed: RuntimeError: broken inside"),
    ("other", {}, "no tool 'other'; the tools are echo"),
    ("echo", {"do": 1}, "wrong type: do must be string"),
    ("echo", [], "wrong type: arguments must be object"),
])
def test_every_failure_is_an_observation(name, arguments, text):
  toolbox = base.Toolbox([_Echo()], timeout_s=0.05)
  result = asyncio.run(toolbox.call("s", ToolCall(name, arguments)))
  assert (result.ok, result.text) == (False, text)
  assert result.seconds > 0


def test_a_result_never_carries_what_utf8_cannot():
  result = asyncio.run(base.Toolbox([_Echo()]).call("s", ToolCall("echo", {"do": "a\ud800"})))
  assert result.text.encode("utf-8") == b"a?"


def test_a_snapshot_moves_one_session_to_another_toolbox():
  first, second = base.Toolbox([_Echo()]), base.Toolbox([_Echo()])
  asyncio.run(first.call("s", ToolCall("echo", {"do": "x"})))
  assert first.snapshot("other") == {}
  second.restore("s", {**first.snapshot("s"), "a tool that is gone": {}})
  assert second.snapshot("s") == {"echo": {"do": "x"}}
  asyncio.run(second.close("s"))
  assert second.snapshot("s") == {}


def test_a_subclass_needs_a_spec_and_a_call_alone():
  class Clock(base.Tool):
    spec = base.ToolSpec("clock", "Tells the time.", {"type": "object", "properties": {}})

    async def call(self, session_id, arguments):
      return ToolResult("noon")

  async def run():
    toolbox = base.Toolbox([Clock()])
    result = await toolbox.call("s", ToolCall("clock", {}))
    toolbox.restore("s", toolbox.snapshot("s"))
    await toolbox.close("s")
    await toolbox.aclose()
    return result.text

  assert asyncio.run(run()) == "noon"


def test_two_tools_of_one_name_are_refused():
  with pytest.raises(ValueError, match="two tools share a name"):
    base.Toolbox([_Echo(), _Echo()])


def test_clipping_keeps_the_bound_and_says_so():
  assert base.clip("abcdefghijkl", 12) == "abcdefghijkl"
  assert base.clip("abcdefghijklm", 12) == "abcdef … cut"
