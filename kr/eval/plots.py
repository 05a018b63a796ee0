"""The report's figures: inline SVG whose colours are the page's own, in light and in dark.

Each figure is drawn with placeholder colours that are then replaced by CSS variables; text
stays text, in the page's font.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import io
import math
import re
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
import numpy as np

INK, GRID = "#0a0b01", "#0a0b02"
SERIES = ("#0a0b11", "#0a0b12", "#0a0b13", "#0a0b14")
_VARIABLES = {INK: "var(--ink)", GRID: "var(--line)",
              **{c: f"var(--s{i})" for i, c in enumerate(SERIES, 1)}}
WINDOW = 5  # steps of the running mean


def figures(
    metrics: Sequence[Mapping[str, Any]], before: Mapping[str, Any], after: Mapping[str, Any],
    gap_bound: float = 1e-3,
) -> list[tuple[str, str, str]]:
  """(title, explanation, SVG) of each figure for which the rows have data.

  metrics: rows of metrics.jsonl. before, after: held-out results as in summary.json.
  gap_bound: the logprob gap at which a run stops.
  """
  smooth = f"Thin: each step; bold: running mean of {WINDOW} steps."
  held_out = {k: (before, after) for k in ("pass@1", "turns", "turns_correct",
                                            "format_fault_rate")}
  plan = [
      ("Reward", "Mean reward of a trajectory of the step: correctness, less the penalty for "
       f"format faults. {smooth}", [("reward", "reward", None)], {}),
      ("Pass rate", "Share of the step's training trajectories that are correct. Points: pass@1 "
       f"on held-out tasks before and after, with 95 % intervals. {smooth}",
       [("pass_rate", "training", "pass@1")], {"low": 0}),
      ("Entropy", "Mean entropy of the policy's next-token distribution, in nats. It falls as "
       f"the policy decides; a collapse to zero would end exploration. {smooth}",
       [("entropy", "entropy", None)], {"low": 0}),
      ("Turns", "Mean turns of all trajectories and of the correct ones, which gamma decay "
       f"shortens. Points: held-out tasks. {smooth}",
       [("turns", "all", "turns"), ("turns_correct", "correct", "turns_correct")], {"low": 0}),
      ("Format faults", "Share of trajectories that end in an invalid call or at the turn or "
       f"context limit. Points: held-out tasks. {smooth}",
       [("format_fault_rate", "faults", "format_fault_rate")], {"low": 0}),
      ("Logprob gap", "Mean absolute difference between the server's and the learner's "
       f"log-probability of a sampled token. It must stay under {gap_bound:g} (dashed): more "
       "would mean that the two run different models.",
       [("logprob_gap", "gap", None)], {"bound": gap_bound}),
      ("Throughput", f"Tokens a second over the whole step. {smooth}",
       [("tokens_per_s", "tokens/s", None)], {"low": 0}),
  ]
  result = []
  for title, text, lines, options in plan:
    series = [(label, *columns(metrics, key), held_out.get(points))
              + (points,) for key, label, points in lines]
    series = [s for s in series if len(s[1])]
    if series:
      result.append((title, text, _lines(title, series, **options)))
  split = _split(metrics)
  if split:
    result.append(("Time split", "Wall-clock seconds of a step, stacked. The rollout's are divided "
                   "by what its concurrent trajectories waited for: the policy or tools.", split))
  return result


def columns(metrics: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
  """Steps and values of the rows that have a finite number under `key`: float64 [N] each."""
  rows = [(r["step"], r[key]) for r in metrics
          if _number(r.get("step")) and _number(r.get(key))]
  data = np.array(rows, np.float64).reshape(-1, 2)
  return data[:, 0], data[:, 1]


def running_mean(values: np.ndarray, window: int = WINDOW) -> np.ndarray:
  """The mean of each value and up to window − 1 before it: [N] → [N]."""
  sums = np.concatenate([[0.0], np.cumsum(values)])
  stop = np.arange(1, len(values) + 1)
  start = np.maximum(0, stop - window)
  return (sums[stop] - sums[start]) / (stop - start)


def _number(value: Any) -> bool:
  return (isinstance(value, (int, float)) and not isinstance(value, bool)
          and math.isfinite(value))


def _lines(title: str, series: list, low: float | None = None,
           bound: float | None = None) -> str:
  figure, axes = _axes()
  last = max(steps[-1] for _, steps, *_ in series)
  for color, (label, steps, values, held_out, name) in zip(SERIES, series):
    if bound:
      axes.plot(steps, np.maximum(values, 1e-12), color=color, lw=1.8, marker="o", ms=2.5)
    else:
      axes.plot(steps, values, color=color, lw=0.9, alpha=0.45, marker="o", ms=2)
      axes.plot(steps, running_mean(values), color=color, lw=2.2, label=label)
    if held_out:
      for x, result in zip((steps[0] - 1, last), held_out):
        _point(axes, x, result, name, color)
  if bound:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.axhline(bound, color=INK, lw=1, ls="--", alpha=0.7)
  elif low is not None:
    axes.set_ylim(bottom=low)
  if len(series) > 1:
    _legend(axes)
  return _svg(figure, title)


def _point(axes, x: float, result: Mapping[str, Any], name: str, color: str) -> None:
  value, bounds = result.get(name), result.get("intervals", {}).get(name)
  if not _number(value) or not bounds or not all(map(_number, bounds)):
    return
  error = [[max(0.0, value - bounds[0])], [max(0.0, bounds[1] - value)]]
  axes.errorbar([x], [value], yerr=error, color=color, fmt="D", ms=5, capsize=4, lw=1.4)


def time_split(row: Mapping[str, Any]) -> dict[str, float]:
  """Wall-clock seconds of one step by what they were spent on; what is not known is 0.

  `policy_s` and `tools_s` are added up over concurrent trajectories, so they only divide
  `rollout_s`; without `policy_s`, `tools_s` is taken as wall-clock time beside it.
  """
  known = {k: float(row[k]) if _number(row.get(k)) else 0.0
           for k in ("rollout_s", "policy_s", "tools_s", "update_s", "publish_s")}
  sampling, tools = known["rollout_s"], known["tools_s"]
  if known["policy_s"]:
    tools = sampling * tools / (known["policy_s"] + tools)
    sampling -= tools
  return {"sampling": sampling, "tools": tools, "update": known["update_s"],
          "publish": known["publish_s"]}


def _split(metrics: Sequence[Mapping[str, Any]]) -> str | None:
  rows = [(r["step"], time_split(r)) for r in metrics if _number(r.get("step"))]
  rows = [(step, split) for step, split in rows if any(split.values())]
  if not rows:
    return None
  figure, axes = _axes()
  steps = np.array([step for step, _ in rows], np.float64)
  base = np.zeros(len(rows))
  width = float(np.min(np.diff(np.unique(steps)), initial=1.0)) * 0.9
  for color, label in zip(SERIES, rows[0][1]):
    seconds = np.array([split[label] for _, split in rows])
    axes.bar(steps, seconds, width, bottom=base, color=color, label=label, lw=0)
    base = base + seconds
  _legend(axes)
  axes.set_ylabel("seconds", color=INK)
  return _svg(figure, "Time split")


def _axes():
  figure = Figure(figsize=(5.2, 2.9), layout="constrained")
  axes = figure.add_subplot()
  axes.set_facecolor("none")
  axes.spines[["top", "right"]].set_visible(False)
  axes.spines[["left", "bottom"]].set_color(GRID)
  axes.tick_params(colors=INK, labelsize=9, length=0)
  axes.grid(axis="y", color=GRID, lw=0.7)
  axes.set_axisbelow(True)
  axes.set_xlabel("step", color=INK)
  axes.xaxis.get_major_locator().set_params(integer=True)
  return figure, axes


def _legend(axes) -> None:
  """Above the axes, where it hides no data."""
  axes.legend(frameon=False, labelcolor=INK, fontsize=9, ncols=4, loc="lower left",
              bbox_to_anchor=(0, 1), borderaxespad=0, handlelength=1.2)


def _svg(figure: Figure, title: str) -> str:
  """The figure as an SVG element: no namespaces, metadata or fixed colours, ids by title."""
  out = io.StringIO()
  with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
    figure.savefig(out, format="svg", transparent=True,
                   metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
  svg = out.getvalue()
  svg = svg[svg.index("<svg"):]
  svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
  svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
  svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
               rf'<svg viewBox="\1" role="img" aria-label="{title}">', svg, count=1)
  slug = re.sub(r"\W+", "-", title.lower())  # inline figures share the page's ids
  svg = re.sub(r'\bid="', f'id="{slug}-', svg)
  svg = re.sub(r'href="#', f'href="#{slug}-', svg).replace("url(#", f"url(#{slug}-")
  svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
  for placeholder, variable in _VARIABLES.items():
    svg = svg.replace(placeholder, variable)
  return svg
