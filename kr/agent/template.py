"""Chat templates: rendering a tokenizer's own template, and deriving delimiters from it.

A template re-renders whole histories, which would re-tokenise text that the policy sampled (and
Qwen3's even drops earlier thinking). So it is rendered twice with sentinel contents, once at
start, and cut: what stands between the sentinels are the delimiters, and nothing else of a
template is used after the first prompt.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any, Sequence

import jinja2
import jinja2.ext
import jinja2.sandbox

# kr's compact ChatML: no newlines between the pieces, so that a short transcript stays short.
COMPACT_TEMPLATE = r"""
{%- macro declare(tools) %}
  {%- if tools %}
    {{- '\n# Tools' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
  {%- endif %}
{%- endmacro %}
{%- if messages[0].role != 'system' and tools %}
  {{- '<|im_start|>system' + declare(tools) + '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'system' %}
    {{- '<|im_start|>system\n' + message.content }}
    {%- if loop.first %}{{- declare(tools) }}{%- endif %}
    {{- '<|im_end|>' }}
  {%- elif message.role == 'user' %}
    {{- '<|im_start|>user\n' + message.content + '<|im_end|>' }}
  {%- elif message.role == 'assistant' %}
    {{- '<|im_start|>assistant<think>' + (message.reasoning_content or '') + '</think>' }}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
      {{- '<tool_call>{"name": ' + (call.function.name | tojson) }}
      {{- ', "arguments": ' + (call.function.arguments | tojson) + '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '<tool_response>' + message.content + '</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>' }}{%- endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}
""".strip()


@dataclasses.dataclass(frozen=True)
class Delimiters:
  """The template's text around what is sampled and what is observed.

  A turn with calls is `think_open` … `think_close` `<tool_call>` `call_pad[0]` JSON `call_pad[1]`
  `</tool_call>`, further calls after `call_between`, then `turn_end`; one with an answer is
  `think_open` … `answer_open` … `answer_close` `turn_end`. `prefix` opens the assistant's turn;
  `think_open` is empty when `prefix` has opened the thinking already. After `turn_end`, an
  observation is `observe[0]` result (`observe[1]` result)* `observe[2]`, the last ending with
  `prefix`.
  """
  prefix: str
  think_open: str
  think_close: str
  answer_open: str
  call_pad: tuple[str, str]
  call_between: str
  turn_end: str
  observe: tuple[str, str, str]
  answer_close: str = ""


class Template:
  """A compiled chat template, rendered as transformers renders it."""

  def __init__(self, source: str, names: dict[str, str]):
    """`names`: further variables, such as bos_token. Raises ValueError on a bad template."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    self._names = names
    self.eos: str | None = names.get("eos_token")
    try:
      self._template = environment.from_string(source)
    except (jinja2.TemplateError, TypeError, AttributeError) as e:  # or no text at all
      raise ValueError(f"the tokenizer's chat template does not compile: {e}") from e

  @classmethod
  def load(cls, tokenizer_dir: str | pathlib.Path) -> "Template":
    """The template of a tokenizer's directory; ValueError when there is none."""
    directory = pathlib.Path(tokenizer_dir)
    config = {}
    if (directory / "tokenizer_config.json").exists():
      config = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
    source = config.get("chat_template")
    if (directory / "chat_template.jinja").exists():
      source = (directory / "chat_template.jinja").read_text("utf-8")
    if isinstance(source, list):  # Several named templates: transformers picks the one for tools.
      named = {entry["name"]: entry["template"] for entry in source}
      source = named.get("tool_use", named.get("default"))
    if not source:
      raise ValueError(f"{directory} has no chat template (chat_template in tokenizer_config.json, "
                       "or chat_template.jinja); write one, such as kr.agent.chat.COMPACT_TEMPLATE")
    names = {k: v["content"] if isinstance(v, dict) else v for k, v in config.items()
             if k.endswith("_token") and isinstance(v, (str, dict))}
    return cls(source, names)

  def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
             generate: bool = True) -> str:
    """The conversation's text. Raises ValueError with the template's own complaint."""
    try:
      return self._template.render(
          messages=messages, tools=tools, add_generation_prompt=generate, **self._names)
    except Exception as e:  # a template can do anything: divide by zero, index, recurse
      raise ValueError(f"the tokenizer's chat template cannot render a tool conversation: {e}"
                       ) from e

  def delimiters(self, special: Sequence[str], tools: bool = True) -> Delimiters:
    """Cuts the delimiters out of a few renderings. Raises ValueError if they cannot be found.

    tools: the template writes thinking, calls and results itself. Otherwise calls and the answer
    are spelled out in the assistant's text, and results come as the user's next message.
    """
    derivation = _Derivation(self, special)
    return derivation.delimiters() if tools else derivation.plain()


class _Derivation:
  """The sentinels, and the steps from two renderings to the delimiters."""

  def __init__(self, template: Template, special: Sequence[str]):
    self._template = template
    self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
    self._opening = [{"role": "system", "content": "krsystemq"},
                     {"role": "user", "content": "krquestionq"}]

  def delimiters(self) -> Delimiters:
    base = self._template.render(self._opening, generate=False)
    prefix = _after(self._template.render(self._opening), base, "the generation prompt")
    think, calls = {"reasoning_content": "krthinkq"}, [_call("krfirstq"), _call("krsecondq")]
    turn = [{"role": "assistant", "content": "", **think, "tool_calls": calls}]
    tools = [{"role": "tool", "name": "krtoolq", "tool_call_id": f"krcall{x}q", "content": x}
             for x in ("krresultaq", "krresultbq")]
    text = _after(self._render(turn + tools), base, "a turn with calls")
    head, text = _cut(text, "krthinkq")
    think_open = _after(head, prefix, "the assistant's turn")
    m = re.match(r"(\s*</think>\s*)<tool_call>(\s*)(\{.*?\})(\s*)</tool_call>(\s*)"
                 r"<tool_call>\s*(\{.*?\})\s*</tool_call>", text, re.DOTALL)
    if not m or "<think>" not in head or not _is_call(m[3], "krfirstq"):
      raise ValueError(
          "the tokenizer's chat template does not write a turn as <think>…</think> and then "
          '<tool_call>{"name": …, "arguments": {…}}</tool_call>, which is the format kr reads')
    turn_end, text = self._turn_end(text[m.end():])
    observe_open, rest = _cut(text, "krresultaq")
    observe_between, observe_close = _cut(rest, "krresultbq")
    self._check_single(turn, tools, base, observe_open, observe_close)
    if not observe_close.endswith(prefix):
      raise ValueError("the tokenizer's chat template does not open the assistant's turn after a "
                       "tool's result as it does after the question")
    answer = [{"role": "assistant", "content": "kranswerq", **think}]
    text = _after(self._template.render(self._opening + answer, generate=False), base, "an answer")
    answer_open, text = _cut(_cut(text, "krthinkq")[1], "kranswerq")
    if not text.startswith(turn_end):
      raise ValueError("the tokenizer's chat template ends an answer and a turn with calls "
                       "differently; kr needs one end of turn")
    return Delimiters(prefix, think_open, m[1], answer_open, (m[2], m[4]), m[5], turn_end,
                      (observe_open, observe_between, observe_close))

  def plain(self) -> Delimiters:
    base = self._template.render(self._opening, generate=False)
    prefix = _after(self._template.render(self._opening), base, "the generation prompt")
    turn = [{"role": "assistant", "content": "kranswerq"}]
    results = [{"role": "user", "content": "krresultaq"}]
    text = _after(self._template.render(self._opening + turn, generate=False), base, "a turn")
    head, text = _cut(text, "kranswerq")
    if head != prefix:
      raise ValueError("the tokenizer's chat template does not open the assistant's turn in the "
                       "history as it does for the next one")
    turn_end, _ = self._turn_end(text)
    text = _after(self._render(turn + results), base + prefix + "kranswerq" + turn_end, "a result")
    observe_open, observe_close = _cut(text, "krresultaq")
    if not observe_close.endswith(prefix):
      raise ValueError("the tokenizer's chat template does not open the assistant's turn after "
                       "the user's second message as it does after the first")
    return Delimiters(prefix, "", "", "<answer>", ("", ""), "", turn_end,
                      (observe_open, "\n", observe_close), answer_close="</answer>")

  def _render(self, messages: list[dict[str, Any]]) -> str:
    return self._template.render(self._opening + messages)

  def _turn_end(self, text: str) -> tuple[str, str]:
    m = self._special.match(text)
    if not m:
      raise ValueError("the tokenizer's chat template does not end the assistant's turn with a "
                       "special token right after its last word")
    return m[0], text[m.end():]

  def _check_single(self, turn: list[dict], tools: list[dict], base: str, opening: str,
                    close: str) -> None:
    text = _after(self._render(turn + tools[:1]), base, "a turn with calls")
    if not text.endswith(opening + "krresultaq" + close):
      raise ValueError("the tokenizer's chat template wraps one tool result differently from "
                       "two; kr cannot derive its delimiters")


def _call(name: str) -> dict[str, Any]:
  return {"type": "function", "id": f"krcall{name}",
          "function": {"name": name, "arguments": {"krkeyq": "krvalueq"}}}


def _is_call(text: str, name: str) -> bool:
  try:
    return json.loads(text) == {"name": name, "arguments": {"krkeyq": "krvalueq"}}
  except ValueError:
    return False


def _after(text: str, start: str, what: str) -> str:
  if not text.startswith(start):
    raise ValueError(f"the tokenizer's chat template changes what came before when {what} "
                     "follows; kr needs a template that only appends")
  return text[len(start):]


def _cut(text: str, sentinel: str) -> tuple[str, str]:
  before, found, after = text.partition(sentinel)
  if not found:
    raise ValueError("the tokenizer's chat template leaves out part of a tool conversation "
                     "(thinking, calls, results or answer); use one that supports tools")
  return before, after


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: Any = None, sort_keys: bool = False) -> str:
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                    sort_keys=sort_keys)


def _raise(message: str) -> None:
  raise jinja2.TemplateError(message)
