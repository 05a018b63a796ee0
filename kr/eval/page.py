"""HTML of a run's record: the page's frame and its look, and a trajectory turn by turn.

What models and pages wrote is data: `text` escapes it, and the frame's content policy forbids
scripts and anything to load besides.
"""

from __future__ import annotations

from collections.abc import Callable
import html
import json
import os
import pathlib
from typing import Any
import unicodedata

from kr.types import FORMAT_FAULTS, ToolCall, ToolResult, Trajectory, Turn

MAX_SHOWN_CHARS = 20_000  # of one text
Decode = Callable[[list[int]], str]


def page(title: str, body: str) -> str:
  """A whole HTML page; `title` and `body` are HTML."""
  return _PAGE.format(title=title, style=_STYLE, body=body)


def write_text(path: str | os.PathLike, text: str) -> None:
  """Writes a file so that a reader sees the old one or the new one, never a half."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  fresh = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    with fresh.open("w", encoding="utf-8") as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.replace(fresh, path)
  finally:
    fresh.unlink(missing_ok=True)


def printable(value: Any) -> str:
  """The value's text without what could steer a terminal or hide text on a page.

  Control, format (such as direction overrides) and surrogate characters become U+FFFD; line
  breaks and tabs stay.
  """
  return "".join("\N{REPLACEMENT CHARACTER}" if c not in "\n\t"
                 and unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in str(value))


def text(value: Any, limit: int = MAX_SHOWN_CHARS) -> str:
  """Escaped text: no markup, no control characters, at most `limit` characters of it."""
  shown = str(value)
  if len(shown) > limit:
    shown = shown[:limit] + f"\n… {len(shown) - limit} characters more"
  return html.escape(printable(shown), quote=True)


def _verdict(t: Trajectory) -> str:
  if t.stop in FORMAT_FAULTS:
    name = t.fault or t.stop.value
    return f"<span class='badge bad'>format fault: {text(name)}</span>"
  if t.correct is None:
    return f"<span class=badge>{text(t.stop.value if t.stop else 'not ended')}</span>"
  return ("<span class='badge good'>correct</span>" if t.correct else
          "<span class='badge bad'>wrong</span>")


def trajectory(label: str, t: Trajectory, decode: Decode | None = None) -> str:
  """One trajectory under a label: verdict, turns with folded observations, answer."""
  turns = "".join(_turn(i, turn, t, decode) for i, turn in enumerate(t.turns, 1))
  calls = sum(len(s.calls) for s in t.turns)
  answer = (f"<p class=answer>Answer: <b>{text(t.answer)}</b></p>"
            if t.answer is not None else "<p class=answer>No answer.</p>")
  return (f"<div class=run><h4>{label} {_verdict(t)}</h4><p><small>{len(t.turns)} turns, {calls} "
          f"tool calls, {len(t.pages)} pages</small></p>{turns}{answer}</div>")


def _turn(number: int, turn: Turn, t: Trajectory, decode: Decode | None) -> str:
  parts = [f"<div class=turn><h5>Turn {number}</h5>"]
  if turn.fault:
    raw = ""
    if decode is not None:
      ids = t.segments[turn.segment].tokens[turn.start:turn.stop]
      raw = f"<pre>{text(decode(ids))}</pre>"
    parts.append(f"<p class=bad>Format fault: {text(turn.fault)}</p>{raw}")
  elif turn.think:
    parts.append(f"<p class=think>{text(turn.think)}</p>")
  results: list[ToolResult | None] = [*turn.results, *[None] * len(turn.calls)]
  for call, result in zip(turn.calls, results):
    parts.append(f"<p class=call><code>{text(format_call(call))}</code></p>")
    if result is not None:
      parts.append(_result(result))
  return "".join(parts) + "</div>"


def format_call(call: ToolCall) -> str:
  """A call as one reads it: `search(queries=["Ayacucho"])`."""
  arguments = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}"
                        for k, v in call.arguments.items())
  return f"{call.name}({arguments})"


def _result(result: ToolResult) -> str:
  first = next(iter(result.text.splitlines()), "")
  state = "" if result.ok else "<span class='badge bad'>failed</span> "
  return (f"<details><summary>{state}{text(first, 80)} <small>{len(result.text)} characters, "
          f"{result.seconds:.2f} s</small></summary><pre>{text(result.text)}</pre></details>")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

_STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #fff; --ink: #3b3f45; --strong: #14161a;
  --line: #dcdee2; --good: #087f5b; --bad: #c92a2a; --s1: #1c6dd0; --s2: #d9730d; --s3: #0b8a6a;
  --s4: #8250c4; }
@media (prefers-color-scheme: dark) { :root { --page: #14161a; --card: #1c1f25; --ink: #b7bcc6;
  --strong: #f1f3f5; --line: #343942; --good: #4cd3a5; --bad: #ff8787; --s1: #6aa9ff; --s2: #ffa94d;
  --s3: #4cd3a5; --s4: #b794f6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.25rem 4rem; background: var(--page);
  color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
h1, h2, h3, h4, b { color: var(--strong); }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .5rem; text-wrap: balance; }
h2 { margin: 3rem 0 .5rem; font-size: 1.3rem; }
h3 { margin: 1.5rem 0 .5rem; font-size: 1rem; }
h4, h5 { margin: 0; font-size: .95rem; } h5 { color: var(--ink); font-size: .8rem; }
p { max-width: 65ch; margin: .4rem 0; }
small, i, figcaption { font-size: .82rem; font-style: normal; opacity: .85; }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin-top: 1.25rem; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .7rem 1rem; display: grid; }
.tile b { font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.tile span { font-size: .85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .75rem 0; }
th { text-align: left; font-weight: 500; color: var(--strong); }
th, td { padding: .35rem 1.1rem .35rem 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
thead th { font-size: .82rem; color: var(--ink); }
table.small { font-size: .88rem; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr));
  gap: 1rem; margin-top: 1rem; }
figure, .run { margin: 0; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 1rem; min-width: 0; }
figure h3 { margin: 0 0 .5rem; } figure svg { width: 100%; height: auto; display: block; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr));
  gap: 1rem; align-items: start; }
article { border-top: 1px solid var(--line); margin-top: 1.5rem; }
.turn { border-top: 1px solid var(--line); padding: .6rem 0; }
.think { font-style: italic; } .think, .call, .answer, summary { overflow-wrap: anywhere; }
.bad { color: var(--bad); } .good { color: var(--good); }
.badge { border: 1px solid; border-radius: 99px; padding: 0 .55rem; font-size: .78rem;
  font-weight: 500; }
code, pre { font: .82rem/1.45 ui-monospace, monospace; }
pre { background: var(--page); border: 1px solid var(--line); border-radius: 6px; padding: .6rem;
  overflow: auto; max-height: 24rem; white-space: pre-wrap; overflow-wrap: anywhere;
  unicode-bidi: isolate; }
summary { cursor: pointer; }
"""
