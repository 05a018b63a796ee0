"""What a tool is, and the toolbox that calls tools for the agent loop.

A tool turns its own failure into an observation that the policy can read (`ok=False` and a
sentence); the toolbox does the same for unknown tools, bad arguments, crashes and time-outs,
so that the loop never has to catch anything.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from typing import Any, Protocol, Sequence

from kr.types import ToolCall, ToolResult

CUT = " … cut"


@dataclasses.dataclass(frozen=True)
class ToolSpec:
  """A tool's declaration. `parameters` is the JSON schema of its arguments (an object)."""
  name: str
  description: str
  parameters: dict[str, Any]


class Tool(Protocol):
  """One tool; all its state is per session, and a session's id is its trajectory's id.

  `call` gets arguments that are already valid against `spec.parameters`. `close` drops one
  session's state, `aclose` the whole tool. `snapshot` returns JSON-able state that `restore`
  can re-attach in another process, or None when there is none. A subclass needs `spec` and
  `call`; the rest does nothing unless it has state to drop or to keep.
  """
  spec: ToolSpec

  async def call(self, session_id: str, arguments: dict[str, Any]) -> ToolResult: ...
  async def close(self, session_id: str) -> None: ...
  async def aclose(self) -> None: ...
  def snapshot(self, session_id: str) -> dict[str, Any] | None: ...
  def restore(self, session_id: str, state: dict[str, Any]) -> None: ...


def clip(text: str, max_chars: int) -> str:
  """`text`, or its beginning and a mark that it was cut; at most `max_chars` characters."""
  if len(text) <= max_chars:
    return text
  return text[:max(0, max_chars - len(CUT))].rstrip() + CUT


def clean(text: str) -> str:
  """`text` without lone surrogates, which JSON can carry but UTF-8 (and a tokenizer) cannot."""
  return text.encode("utf-8", "replace").decode("utf-8")


_TYPES = {
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: (isinstance(v, int) and not isinstance(v, bool)) or (
        isinstance(v, float) and math.isfinite(v)),
    "boolean": lambda v: isinstance(v, bool),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
    "null": lambda v: v is None,
}


def validate(arguments: Any, schema: dict[str, Any]) -> str | None:
  """What is wrong with `arguments` under `schema`, or None; it never raises on any JSON value.

  The subset of JSON schema: type (also a list of types), properties, required,
  additionalProperties (unknown ones are refused unless it is true), items, minItems, maxItems,
  minLength, maxLength, minimum, enum. Booleans are not integers, 1.0 is not an integer, NaN is
  not a number. Messages begin with `unknown argument`, `missing argument` or `wrong type` for
  these three kinds, at any depth.
  """
  return _validate(arguments, schema, "")


def _validate(value: Any, schema: dict[str, Any], path: str) -> str | None:
  where = path or "arguments"
  types = schema.get("type")
  if types is not None:
    types = [types] if isinstance(types, str) else list(types)
    if not any(_TYPES[t](value) for t in types):
      return f"wrong type: {where} must be {' or '.join(types)}"
  if "enum" in schema and not any(type(v) is type(value) and v == value for v in schema["enum"]):
    return f"wrong value: {where} must be one of {', '.join(map(repr, schema['enum']))}"
  if isinstance(value, dict):
    return _validate_object(value, schema, path)
  if isinstance(value, (str, list)):
    unit, low, high = (("characters", "minLength", "maxLength") if isinstance(value, str)
                       else ("items", "minItems", "maxItems"))
    if len(value) > schema.get(high, len(value)):
      return f"too long: {where} has {len(value)} {unit}, at most {schema[high]} are allowed"
    if len(value) < schema.get(low, 0):
      return f"too short: {where} has {len(value)} {unit}, at least {schema[low]} are needed"
  if isinstance(value, list) and "items" in schema:
    for i, item in enumerate(value):
      if wrong := _validate(item, schema["items"], f"{path}[{i}]"):
        return wrong
  if "minimum" in schema and _TYPES["number"](value) and value < schema["minimum"]:
    return f"too small: {where} must be at least {schema['minimum']}"
  return None


def _validate_object(value: dict, schema: dict[str, Any], path: str) -> str | None:
  prefix = f"{path}." if path else ""
  properties = schema.get("properties", {})
  for key in value:
    if key not in properties and schema.get("additionalProperties", False) is not True:
      return f"unknown argument: {clip(prefix + str(key), 60)!r}"
  for key in schema.get("required", ()):
    if key not in value:
      return f"missing argument: {prefix + key!r}"
  for key, item in value.items():
    if key in properties:
      if wrong := _validate(item, properties[key], prefix + key):
        return wrong
  return None


class Toolbox:
  """The tools of a run, called by name; safe for many sessions at once."""

  def __init__(self, tools: Sequence[Tool], timeout_s: float = 30.0):
    """Raises ValueError when two tools share a name."""
    self._tools = {tool.spec.name: tool for tool in tools}
    if len(self._tools) != len(tools):
      raise ValueError(f"two tools share a name: {[t.spec.name for t in tools]}")
    self._timeout_s = timeout_s
    self.specs: list[ToolSpec] = [tool.spec for tool in tools]

  async def call(self, session_id: str, call: ToolCall) -> ToolResult:
    """The tool's result with `seconds` set; every failure is a result with ok=False."""
    start = time.monotonic()
    result = await self._call(session_id, call)
    result.text = clean(result.text)
    result.seconds = time.monotonic() - start
    return result

  async def _call(self, session_id: str, call: ToolCall) -> ToolResult:
    tool = self._tools.get(call.name)
    if tool is None:
      return ToolResult(f"no tool {clip(str(call.name), 60)!r}; the tools are "
                        f"{', '.join(self._tools)}", ok=False)
    if wrong := validate(call.arguments, tool.spec.parameters):
      return ToolResult(wrong, ok=False)
    try:
      return await asyncio.wait_for(tool.call(session_id, call.arguments), self._timeout_s)
    except TimeoutError:
      return ToolResult(f"{call.name} timed out after {self._timeout_s:g} s", ok=False)
    except Exception as e:  # A tool's bug must not end the rollout; the log keeps the traceback.
      logging.exception("tool %s failed in session %s", call.name, session_id)
      return ToolResult(f"{call.name} failed: {clip(f'{type(e).__name__}: {e}', 300)}", ok=False)

  async def close(self, session_id: str) -> None:
    """Drops the session's state in every tool."""
    await asyncio.gather(*(tool.close(session_id) for tool in self._tools.values()))

  async def aclose(self) -> None:
    """Releases everything that the tools hold."""
    await asyncio.gather(*(tool.aclose() for tool in self._tools.values()))

  def snapshot(self, session_id: str) -> dict[str, Any]:
    """The session's state as JSON-able {tool name: state}; tools without state are left out."""
    states = {name: tool.snapshot(session_id) for name, tool in self._tools.items()}
    return {name: state for name, state in states.items() if state is not None}

  def restore(self, session_id: str, state: dict[str, Any]) -> None:
    """Re-attaches a snapshot, also one of another process; unknown tools in it are ignored."""
    for name, tool_state in state.items():
      if name in self._tools:
        self._tools[name].restore(session_id, tool_state)
