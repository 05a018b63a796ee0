"""What a run leaves behind: the console table, summary.json and report.html.

The report is one file without scripts and without anything to load. What models and pages
wrote is data: `kr.eval.page` escapes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import math
import os
from typing import Any

from kr.eval import page
from kr.eval import plots
from kr.eval import stats
from kr.types import StopReason, Trajectory

LABELS = {
    "pass@1": "pass@1", "pass@4": "pass@4", "turns": "turns",
    "turns_correct": "turns, correct ones", "tool_calls": "tool calls",
    "pages": "distinct pages", "format_fault_rate": "format faults",
}


# ---------------------------------------------------------------------------------- summary


def flatten(table: Mapping[str, Any]) -> dict[str, Any]:
  """A table of `stats.table` as it stands in summary.json: numbers, and their intervals.

  {"pass@1": 0.5, …, "intervals": {"pass@1": [0.4, 0.6], …}, "tasks", "trajectories", and for
  the whole table "infrastructure", "stops", "faults", "by_kind", "by_hops"}. None stands
  where there is no data.
  """
  flat: dict[str, Any] = {name: table[name]["mean"] for name in stats.METRICS}
  flat["intervals"] = {name: [table[name]["low"], table[name]["high"]]
                       for name in stats.METRICS}
  for key in ("tasks", "trajectories", "infrastructure", "stops", "faults"):
    if key in table:
      flat[key] = table[key]
  for key in ("by_kind", "by_hops"):
    if key in table:
      flat[key] = {name: flatten(part) for name, part in table[key].items()}
  return flat


def write_summary(
    path: str | os.PathLike, *, before: Mapping[str, Any], after: Mapping[str, Any],
    max_logprob_gap: float | None, minutes: Mapping[str, float], config: Mapping[str, Any],
    commit: str, hardware: Any, seed: int, **more: Any,
) -> dict[str, Any]:
  """Writes summary.json, atomically, and returns it.

  before, after: tables of `stats.table`. max_logprob_gap: the largest of the steps' mean
  absolute gaps between server and learner. minutes: per stage. more: further top-level
  entries (such as the guesser's share). Raises ValueError for a value that JSON cannot hold.
  """
  summary = {"before": flatten(before), "after": flatten(after),
             "max_logprob_gap": max_logprob_gap, "minutes": dict(minutes), "config": config,
             "commit": commit, "hardware": hardware, "seed": seed, **more}
  page.write_text(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")
  return summary


def format_table(before: Mapping[str, Any], after: Mapping[str, Any] | None = None) -> str:
  """The table for the console: a row per metric, means with their 95 % intervals.

  before, after: tables of `stats.table` or their `flatten`ed form; without `after` there is
  one column of numbers.
  """
  columns = [before if "intervals" in before else flatten(before)]
  heads = ["result"]
  if after is not None:
    columns.append(after if "intervals" in after else flatten(after))
    heads = ["before", "after"]
  rows = [["", *heads]]
  for name in stats.METRICS:
    rows.append([LABELS[name], *(_cell(c, name) for c in columns)])
  rows.append(["tasks × samples", *(_size(c) for c in columns)])
  lost = [c.get("infrastructure", 0) for c in columns]
  if any(lost):
    rows.append(["infrastructure failures", *map(str, lost)])
  widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
  lines = ["  ".join(x.ljust(w) for x, w in zip(r, widths)).rstrip() for r in rows]
  return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _number(value: Any) -> str:
  if value is None or not math.isfinite(value):
    return "–"
  return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _cell(flat: Mapping[str, Any], name: str) -> str:
  low, high = flat["intervals"][name]
  if flat[name] is None:
    return "–"
  return f"{_number(flat[name])} [{_number(low)}, {_number(high)}]"


def _size(flat: Mapping[str, Any]) -> str:
  return f"{flat['tasks']} tasks, {flat['trajectories']} samples"


# ----------------------------------------------------------------------------------- report


def write_report(
    path: str | os.PathLike, summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]],
    before: Sequence[Trajectory], after: Sequence[Trajectory],
    decode: page.Decode | None = None,
) -> None:
  """Writes report.html, self-contained, atomically.

  summary: as written by `write_summary`. metrics: rows of metrics.jsonl. before, after: the
  two evaluations' trajectories. decode: token ids to text, to show what a turn with a format
  fault really said.
  """
  head = summary["before"], summary["after"]
  pairs = sample_pairs(before, after)
  body = "\n".join([
      _header(summary),
      _tables(*head),
      _figures(plots.figures(
          metrics, *head, gap_bound=_get(summary, "config", "rl", "max_logprob_gap") or 1e-3)),
      _samples(pairs, decode),
      _details(summary),
  ])
  title = f"kr: {_number(head[0]['pass@1'])} → {_number(head[1]['pass@1'])}"
  page.write_text(path, page.page(title, body))


def sample_pairs(
    before: Sequence[Trajectory], after: Sequence[Trajectory], count: int = 3
) -> list[tuple[Trajectory, Trajectory]]:
  """The first sample of `count` tasks, before and after, chosen by kind and never by outcome.

  Kinds are ordered by hops and name; the first task of the first, middle and last kind is
  taken, then further tasks in order. Only tasks that both evaluations hold count.
  """
  firsts = [{t.task.id: t for t in reversed(list(ts))
             if t.sample == 0 and t.stop is not StopReason.INFRASTRUCTURE}
            for ts in (before, after)]
  shared = [t for t in before if firsts[0].get(t.task.id) is t and t.task.id in firsts[1]]
  kinds: dict[tuple[int, str], Trajectory] = {}
  for t in shared:
    kinds.setdefault((t.task.hops, t.task.kind), t)
  ordered = [kinds[k] for k in sorted(kinds)]
  spread = [ordered[round(i * (len(ordered) - 1) / max(1, count - 1))]
            for i in range(count)] if ordered else []
  chosen: list[str] = []
  for t in [*spread, *shared]:
    if t.task.id not in chosen:
      chosen.append(t.task.id)
  return [(firsts[0][i], firsts[1][i]) for i in chosen[:count]]


def _header(summary: Mapping[str, Any]) -> str:
  b, a = summary["before"], summary["after"]
  steps = page.text(_get(summary, "config", "rl", "steps") or "")
  facts = [
      ("pass@1", f"{_number(b['pass@1'])} → {_number(a['pass@1'])}"),
      ("format faults", f"{_number(b['format_fault_rate'])} → {_number(a['format_fault_rate'])}"),
      ("turns, correct", f"{_number(b['turns_correct'])} → {_number(a['turns_correct'])}"),
  ]
  if summary.get("max_logprob_gap") is not None:
    facts.append(("largest logprob gap", f"{summary['max_logprob_gap']:.1e}"))
  total = sum(summary["minutes"].values())
  tiles = "".join(f"<div class=tile><b>{value}</b><span>{name}</span></div>"
                  for name, value in facts)
  return (
      f"<header><h1>A research agent, before and after reinforcement learning</h1>"
      f"<p>{page.text(b['tasks'])} held-out tasks; {steps} training steps; seed "
      f"{page.text(summary['seed'])}; {total:.1f} minutes in all; commit "
      f"<code>{page.text(str(summary['commit'])[:12])}</code>.</p>"
      f"<div class=tiles>{tiles}</div></header>")


def _get(data: Any, *keys: str) -> Any:
  for key in keys:
    data = data.get(key) if isinstance(data, Mapping) else None
  return data


def _tables(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
  rows = "".join(
      f"<tr><th>{LABELS[m]}</th>{_td(before, m)}{_td(after, m)}</tr>" for m in stats.METRICS)
  lost = before.get("infrastructure", 0), after.get("infrastructure", 0)
  note = (f" Failures of the infrastructure are left out: {lost[0]} before, {lost[1]} after."
          if any(lost) else "")
  parts = [
      "<section><h2>Held-out tasks</h2><p>Mean and 95 % bootstrap interval over tasks. pass@4 "
      "is the unbiased estimate of at least one right answer in four. A format fault is an "
      f"invalid call, or an overrun of the turn or context limit.{note}</p>"
      "<div class=wide><table><thead><tr><th></th><th>before</th><th>after</th></tr></thead>"
      f"<tbody>{rows}</tbody></table></div>"]
  for key, label in (("by_kind", "kind of task"), ("by_hops", "pages to read")):
    parts.append(_breakdown(before.get(key, {}), after.get(key, {}), label))
  return "".join(parts) + "</section>"


def _breakdown(before: Mapping[str, Any], after: Mapping[str, Any], label: str) -> str:
  names = sorted({*before, *after})
  if not names:
    return ""
  shown = ("pass@1", "turns", "format_fault_rate")
  head = "".join(f"<th colspan=2>{LABELS[m]}</th>" for m in shown)
  sub = "<th>before</th><th>after</th>" * len(shown)
  rows = []
  for name in names:
    b, a = before.get(name), after.get(name)
    cells = "".join(_td(part, m) if part else "<td>–</td>" for m in shown for part in (b, a))
    rows.append(f"<tr><th>{page.text(name)}</th><td>{(b or a)['tasks']}</td>{cells}</tr>")
  return (f"<h3>By {label}</h3><div class=wide><table class=small><thead><tr><th rowspan=2>"
          f"</th><th rowspan=2>tasks</th>{head}</tr><tr>{sub}</tr></thead>"
          f"<tbody>{''.join(rows)}</tbody></table></div>")


def _td(flat: Mapping[str, Any], name: str) -> str:
  low, high = flat["intervals"][name]
  if flat[name] is None:
    return "<td>–</td>"
  return f"<td>{_number(flat[name])} <i>{_number(low)}–{_number(high)}</i></td>"


def _figures(figures: list[tuple[str, str, str]]) -> str:
  if not figures:
    return "<section><h2>Over the steps</h2><p>No step was trained yet.</p></section>"
  cards = "".join(f"<figure><h3>{title}</h3>{svg}<figcaption>{text}</figcaption></figure>"
                  for title, text, svg in figures)
  return f"<section><h2>Over the steps</h2><div class=grid>{cards}</div></section>"


def _samples(
    pairs: Sequence[tuple[Trajectory, Trajectory]], decode: page.Decode | None
) -> str:
  parts = ["<section><h2>Sample trajectories</h2><p>The first sample of a few held-out tasks, "
           "chosen by the kind of task and not by the outcome. Observations are folded.</p>"]
  for before, after in pairs:
    task = before.task
    parts.append(
        f"<article><h3>{page.text(task.question)}</h3>"
        f"<p>Ground truth: <b>{page.text(task.answer)}</b> <small>(kind: {page.text(task.kind)}; "
        f"pages to read: {page.text(task.hops)})</small></p><div class=pair>"
        f"{page.trajectory('Before', before, decode)}{page.trajectory('After', after, decode)}"
        "</div></article>")
  return "".join(parts) + "</section>"


def _details(summary: Mapping[str, Any]) -> str:
  minutes = "".join(f"<tr><th>{page.text(k)}</th><td>{v:.2f}</td></tr>"
                    for k, v in summary["minutes"].items())
  facts = {k: summary[k] for k in ("commit", "hardware", "seed")}
  return (
      "<section><h2>The run</h2><div class=wide><table class=small><thead><tr><th>stage</th>"
      f"<th>minutes</th></tr></thead><tbody>{minutes}</tbody></table></div>"
      f"<pre>{page.text(json.dumps(facts, indent=2, ensure_ascii=False))}</pre>"
      "<details><summary>Config</summary><pre>"
      f"{page.text(json.dumps(summary['config'], indent=2, ensure_ascii=False))}</pre></details>"
      "</section>")
