"""The report, the summary and the console table."""

import html.parser
import json
import re

import pytest

from kr.eval import page
from kr.eval import plots
from kr.eval import report
from kr.eval import stats
from kr.types import Segment, StopReason, Task, ToolCall, ToolResult, Trajectory, Turn

HOSTILE = "</pre></details><script>alert(1)</script><img src=http://evil.example/x onerror=a()>"


def trajectory(task="t", sample=0, correct=True, stop=StopReason.ANSWERED, kind="lookup", hops=1,
               text="observation", answer="42", fault=None):
  turns = [Turn(0, 0, 2, 0, think=f"think {text}", calls=[ToolCall("open", {"id": text})],
                results=[ToolResult(text, meta={"url": "u"})]),
           Turn(0, 2, 4, 0, think="done", answer=answer, fault=fault)]
  segment = Segment()
  segment.append_sampled([1, 2, 3, 4], [-0.1] * 4, 0)
  return Trajectory(f"{task}{sample}", Task(task, f"question {text}", f"truth {text}", kind,
                                            hops=hops),
                    sample, [segment], turns, stop, answer, fault, correct)


def summary_of(before, after, path, **changes):
  tables = [stats.table(stats.by_task(ts)) for ts in (before, after)]
  values = dict(before=tables[0], after=tables[1], max_logprob_gap=2e-6,
                minutes={"world": 0.5, "rl": 6.25}, config={"seed": 1, "rl": {"steps": 40}},
                commit="abcdef0123456789", hardware={"cpu": "two cores"}, seed=1)
  return report.write_summary(path, **{**values, **changes})


def rows(n):
  return [{"step": i, "reward": 0.1 * i, "pass_rate": 0.2, "entropy": 1.0, "turns": 4,
           "turns_correct": 3, "format_fault_rate": 0.1, "logprob_gap": 1e-6,
           "tokens_per_s": 500, "rollout_s": 3, "tools_s": 1, "update_s": 2, "publish_s": 0.1}
          for i in range(n)]


class Page(html.parser.HTMLParser):
  """Collects the tags, attributes and visible text of a page, and checks its nesting."""

  VOID = {"meta", "img", "path", "use", "rect", "br"}

  def __init__(self, text):
    super().__init__()
    self.tags, self.attributes, self.text, self.stack = [], [], "", []
    self.feed(text)
    assert not self.stack

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs
    if tag not in self.VOID:
      self.stack.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs

  def handle_endtag(self, tag):
    if tag not in self.VOID:
      assert self.stack.pop() == tag

  def handle_data(self, data):
    if not self.stack or self.stack[-1] != "style":
      self.text += data


def build(tmp_path, metrics=(), text="observation", **kwargs):
  before = [trajectory(f"t{i}", correct=False, text=text, kind=f"k{i}<b>", **kwargs)
            for i in range(4)]
  after = [trajectory(f"t{i}", correct=True, text=text, kind=f"k{i}<b>") for i in range(4)]
  summary = summary_of(before, after, tmp_path / "summary.json")
  path = tmp_path / "report.html"
  report.write_report(path, summary, list(metrics), before, after,
                      decode=lambda ids: f"decoded {ids} {text}")
  return path.read_text()


def test_what_pages_and_models_wrote_is_escaped_and_nothing_can_run_or_load(tmp_path):
  text = build(tmp_path, rows(5), HOSTILE, fault="not_json<script>",
               stop=StopReason.INVALID_ACTION)
  parsed = Page(text)
  assert not {"script", "img", "iframe", "link", "object", "embed"} & set(parsed.tags)
  assert not [a for a, _ in parsed.attributes if a.startswith("on") or a in ("src", "srcset")]
  links = [v for a, v in parsed.attributes if a.endswith("href")]
  assert all(v.startswith("#") for v in links)
  assert HOSTILE in parsed.text  # the reader still sees what was written
  policy = [v for a, v in parsed.attributes if a == "content" and "default-src" in v]
  assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
  assert "url(http" not in text and "@import" not in text


def test_the_report_shows_turns_observations_answers_and_the_truth(tmp_path):
  parsed = Page(build(tmp_path, rows(5)))
  for part in ("think observation", 'open(id="observation")', "Answer: 42", "truth observation",
               "correct", "wrong", "Turn 2", "pass@4", "distinct pages", "Before", "After"):
    assert part in parsed.text
  assert parsed.tags.count("article") == 3  # three tasks, each before and after
  assert parsed.tags.count("svg") == 8
  assert "details" in parsed.tags


def test_a_turn_with_a_fault_shows_what_was_really_sampled(tmp_path):
  parsed = Page(build(tmp_path, fault="not_json", stop=StopReason.INVALID_ACTION))
  assert "Format fault: not_json" in parsed.text
  assert "decoded [3, 4]" in parsed.text


@pytest.mark.parametrize("metrics, figures", [
    ([], 0), ([{"step": 1}], 0), ([{"step": 1, "reward": None, "entropy": float("nan")}], 0),
    ([{"step": 1, "reward": 0.5}], 1), ([{"reward": 0.5}], 0),
    ([{"step": 1, "rollout_s": 1.0}, {"step": 3, "update_s": 2.0}], 1),
    ([{"step": 1, "logprob_gap": 0.0}], 1)])
def test_missing_metrics_leave_their_figures_out(tmp_path, metrics, figures):
  assert Page(build(tmp_path, metrics)).tags.count("svg") == figures


def test_figures_share_no_ids_and_use_the_colours_of_the_page(tmp_path):
  text = build(tmp_path, rows(20))
  ids = re.findall(r'\bid="([^"]*)"', text)
  assert len(ids) == len(set(ids))
  assert set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', text)) <= {
      pair for i in ids for pair in ((i, ""), ("", i))}
  assert "#0a0b" not in text and "var(--s1)" in text


def test_control_characters_surrogates_and_endless_texts_do_not_reach_the_page():
  assert page.text("a\x00\x1b[31m\ud800\u202e\xa0b") == "a\ufffd\ufffd[31m\ufffd\ufffd\xa0b"
  shown = page.text("x" * 30_000)
  assert len(shown) < 21_000 and "10000 characters more" in shown


def test_sample_tasks_are_chosen_by_kind_and_not_by_outcome():
  def group(correct):
    return [trajectory(f"t{i}{kind}", s, correct, kind=kind, hops=hops)
            for kind, hops in (("a", 1), ("b", 2), ("c", 3)) for i in range(2) for s in range(2)]
  chosen = [pair[0].task.id for pair in report.sample_pairs(group(True), group(False))]
  assert chosen == ["t0a", "t0b", "t0c"]
  assert chosen == [p[0].task.id for p in report.sample_pairs(group(False), group(True))]
  assert report.sample_pairs([], group(True)) == []
  one = [trajectory("only")]
  assert len(report.sample_pairs(one, one)) == 1


def test_the_running_mean_looks_back_and_never_ahead():
  assert plots.running_mean([2.0, 4.0, 6.0, 8.0], 2).tolist() == [2.0, 3.0, 5.0, 7.0]


def test_the_time_split_divides_the_rollout_by_what_its_trajectories_waited_for():
  row = {"step": 1, "rollout_s": 8, "policy_s": 90, "tools_s": 30, "update_s": 2}
  assert plots.time_split(row) == {"sampling": 6, "tools": 2, "update": 2, "publish": 0}
  assert plots.time_split({"rollout_s": 8, "tools_s": 1}) == {
      "sampling": 8, "tools": 1, "update": 0, "publish": 0}


def test_the_summary_has_the_promised_entries_and_reads_back_the_same(tmp_path):
  before = [trajectory("t0", s, s == 0) for s in range(4)]
  after = [trajectory("t0", s, True) for s in range(4)]
  path = tmp_path / "deep" / "summary.json"
  summary = summary_of(before, after, path, guesser_share=0.02)
  assert json.loads(path.read_text()) == summary
  assert {"before", "after", "max_logprob_gap", "minutes", "config", "commit", "hardware", "seed",
          "guesser_share"} == set(summary)
  for part, passed in (("before", 0.25), ("after", 1.0)):
    assert summary[part]["pass@1"] == passed
    for name in ("pass@1", "pass@4", "turns", "tool_calls", "pages", "format_fault_rate"):
      low, high = summary[part]["intervals"][name]
      assert low <= summary[part][name] <= high
  assert not list(path.parent.glob(".*"))  # written under another name, then renamed


def test_a_summary_with_a_number_that_json_lacks_is_refused_and_the_old_one_kept(tmp_path):
  ts = [trajectory("t0")]
  summary_of(ts, ts, tmp_path / "summary.json")
  with pytest.raises(ValueError):
    summary_of(ts, ts, tmp_path / "summary.json", max_logprob_gap=float("nan"))
  assert json.loads((tmp_path / "summary.json").read_text())["max_logprob_gap"] == 2e-6


def test_the_console_table_has_a_row_per_metric_with_intervals(tmp_path):
  before = stats.table({"t": [trajectory("t", s, s < 2) for s in range(4)]})
  after = stats.table({"t": [trajectory("t", s, None, StopReason.INFRASTRUCTURE)
                             for s in range(4)]})
  lines = report.format_table(before, after).splitlines()
  assert lines[0].split() == ["before", "after"]
  assert [l for l in lines if l.startswith("pass@1")][0].split() == [
      "pass@1", "0.500", "[0.500,", "0.500]", "–"]
  assert "infrastructure failures  0" in re.sub(" {2,}", "  ", report.format_table(before, after))
  assert report.format_table(report.flatten(before)).splitlines()[0].split() == ["result"]
