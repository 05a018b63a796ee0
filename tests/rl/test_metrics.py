import json
import math
import pathlib

import numpy as np
import pytest

from kr import types
from kr.rl import metrics
from kr.types import StopReason


def trajectory(stop, correct=None, turns=1, urls=(), fault=None, sampled=3):
  segment = types.Segment()
  segment.append_context([1])
  segment.append_sampled([2] * sampled, [-1.0] * sampled, 0)
  result = types.Trajectory("id", types.Task("t", "?", "!", "kind"), 0, [segment], stop=stop,
                            correct=correct, fault=fault)
  for _ in range(turns):
    result.turns.append(types.Turn(
        0, 1, 2, 0, calls=[types.ToolCall("open", {})] * len(urls),
        results=[types.ToolResult("", meta={"url": u}) for u in urls], policy_s=0.5, tools_s=0.25))
  return result


def test_summary_by_hand():
  trajectories = [
      trajectory(StopReason.ANSWERED, True, turns=2, urls=("u", "v")),
      trajectory(StopReason.ANSWERED, False, turns=4),
      trajectory(StopReason.INVALID_ACTION, fault="not_json", urls=("u",)),
      trajectory(StopReason.MAX_TURNS, turns=5),
  ]
  rewards = [np.array([0.5, 1.0]), np.zeros(4), np.array([-0.5]), np.full(5, -0.5)]
  assert metrics.summarize(trajectories, rewards, infrastructure=2) == {
      "trajectories": 4, "reward": pytest.approx((0.75 - 0.5 - 0.5) / 4), "pass_rate": 0.25,
      "format_fault_rate": 0.5, "turns": 3.0, "turns_correct": 2.0, "tool_calls": 1.25,
      "pages": 0.75, "sampled_tokens": 12, "policy_s": 6.0, "tools_s": 3.0, "infrastructure": 2,
      "faults/max_turns": 1, "faults/not_json": 1}


def test_means_over_nothing_are_none():
  summary = metrics.summarize([], [])
  assert summary["pass_rate"] is None and summary["turns_correct"] is None
  assert summary["sampled_tokens"] == 0
  overflow = trajectory(StopReason.CONTEXT_OVERFLOW, turns=0)
  assert metrics.summarize([overflow], [np.zeros(0)])["reward"] is None


def test_a_reward_for_each_trajectory():
  with pytest.raises(ValueError, match="0 trajectories but 1 rewards"):
    metrics.summarize([], [np.zeros(1)])


def test_lines_are_whole_when_write_returns(tmp_path):
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write(1, {"a": np.float32(0.5), "n": np.int64(3), "nan": math.nan, "none": None})
    assert metrics.read(tmp_path) == [{"step": 1, "a": 0.5, "n": 3, "nan": None, "none": None}]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_resuming_drops_later_steps_and_the_torn_line(tmp_path):
  with metrics.MetricsWriter(tmp_path) as writer:
    for step in (1, 2, 3):
      writer.write(step, {"a": step})
  with open(tmp_path / "metrics.jsonl", "a") as file:
    file.write('{"step": 4, "a"')
  assert [line["step"] for line in metrics.read(tmp_path)] == [1, 2, 3]
  with metrics.MetricsWriter(tmp_path, restored_step=2) as writer:
    writer.write(3, {"a": 30})
  assert metrics.read(tmp_path) == [{"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 3, "a": 30}]
  assert [p.name for p in tmp_path.glob("*.tmp")] == []


def test_without_a_restored_step_every_whole_line_stays(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n{"st')
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write(8, {})
  assert metrics.read(tmp_path) == [{"step": 7}, {"step": 8}]


def test_a_workdir_without_metrics_reads_as_empty(tmp_path):
  assert metrics.read(tmp_path / "missing") == []


def test_scalars_reach_tensorboard(tmp_path):
  event = pytest.importorskip("tensorboardX.proto.event_pb2")
  with metrics.MetricsWriter(tmp_path, restored_step=0) as writer:
    writer.write(5, {"pass_rate": 0.25, "name": "x", "nothing": None})
  found = {}
  for path in pathlib.Path(tmp_path, "tensorboard").iterdir():
    data = path.read_bytes()
    while data:  # a record: length (8 bytes), its checksum (4), the event, its checksum (4)
      size = int.from_bytes(data[:8], "little")
      parsed = event.Event.FromString(data[12:12 + size])
      found.update({v.tag: (parsed.step, v.simple_value) for v in parsed.summary.value})
      data = data[16 + size:]
  assert found == {"pass_rate": (5, 0.25)}


def test_damage_within_the_file_is_named(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
  with pytest.raises(metrics.MetricsError, match="line 2 of .* damaged"):
    metrics.MetricsWriter(tmp_path)


def test_a_workdir_that_cannot_be_written_is_named(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(metrics.MetricsError, match="metrics.jsonl"):
    metrics.MetricsWriter(tmp_path / "file")


def test_lines_are_json_one_a_step(tmp_path):
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write(1, {"b": True})
  assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "b": True}


def test_console_line_divides_tool_time_by_what_ran_at_once_and_shows_gaps_as_dashes():
  row = {"reward": 0.5, "pass_rate": 0.25, "format_fault_rate": 0.0, "turns": 3.0, "policy_s": 30.0,
         "tools_s": 10.0, "rollout_s": 2.0, "update_s": 1.0, "publish_s": 0.5, "entropy": None}
  line = metrics.console_line(7, row)
  assert "step   7" in line and "pass 0.25" in line and "entropy –" in line and "gap –" in line
  assert "(tools 0.5)" in line  # 10 of 40 trajectory-seconds, in 2 seconds
  empty = metrics.summarize([], [], 0)
  assert "reward –" in metrics.console_line(1, {**row, **empty})


def test_console_line_counts_what_was_paused_resumed_stale_or_excluded_where_there_is_any():
  row = {"policy_s": 1.0, "tools_s": 0.0, "rollout_s": 1.0, "update_s": 1.0, "publish_s": 0.5}
  assert metrics.console_line(1, {**row, "paused": 0, "stale": 0}).endswith("publish 0.5 s")
  full = {**row, "paused": 3, "resumed": 2, "stale": 5, "infrastructure": 1, "turn_timeouts": 1,
          "tool_timeouts": 4, "mixed_versions": 6}
  assert metrics.console_line(1, full).endswith(
      "paused 3  resumed 2  stale 5  excluded 1  slow turns 1  slow tools 4  mixed turns 6")
