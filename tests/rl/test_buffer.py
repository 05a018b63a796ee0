import json
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import zlib

import pytest

import kr
from kr import types
from kr.rl import buffer

ROOT = str(pathlib.Path(kr.__file__).parents[1])
FINISHED, PAUSED, EXCLUDED = (
    types.StopReason.ANSWERED, types.StopReason.PAUSED, types.StopReason.INFRASTRUCTURE)


def trajectory(id, stop=FINISHED, task="t", sample=0, tokens=2):
  segment = types.Segment()
  segment.append_context([1, 2])
  segment.append_sampled([3] * tokens, [-0.1] * tokens, 7)
  turn = types.Turn(0, 2, 2 + tokens, 7, "hm", [types.ToolCall("search", {"queries": ["ü"]})],
                    results=[types.ToolResult("found", meta={"url": "u"})])
  state = {"search": {"next": 3}} if stop == PAUSED else None
  return types.Trajectory(id, types.Task(task, "?", "!", "kind", aliases=("a",)), sample, [segment],
                          [turn], stop, correct=True, tool_state=state, meta={"x": 1.5})


def ids(groups):
  return [[t.id for t in group] for group in groups]


@pytest.fixture
def store(tmp_path):
  with buffer.ReplayBuffer(tmp_path / "buffer.db") as result:
    yield result


def test_a_stored_trajectory_comes_back_equal(store):
  original = trajectory("a", PAUSED)
  assert store.put(original, 3)
  copy = store.get("a")
  assert copy.meta.pop("step_made") == 3
  assert copy == original
  assert store.get("b") is None


def test_finished_is_final_and_put_is_idempotent(store):
  assert store.put(trajectory("a", PAUSED), 1)
  assert store.put(trajectory("a"), 2)
  assert not store.put(trajectory("a", tokens=5), 3)
  assert not store.put(trajectory("a", PAUSED), 3)
  assert not store.put(trajectory("a", EXCLUDED), 3)
  assert store.rows(["a", "b"]) == {"a": buffer.Row("finished", 1, 2, None)}
  assert store.get("a").sampled_tokens == 2


def test_excluded_may_be_run_again(store):
  store.put(trajectory("a", EXCLUDED), 1)
  assert store.rows(["a"])["a"].state == "excluded"
  assert store.put(trajectory("a"), 1)
  assert store.rows(["a"])["a"].state == "finished"


def test_a_running_trajectory_is_refused(store):
  with pytest.raises(ValueError, match="still running"):
    store.put(trajectory("a", None), 1)


def test_only_complete_groups_wait_for_training(store):
  store.put(trajectory("a1", task="a", sample=1), 1)
  store.put(trajectory("a0", task="a", sample=0), 1)
  store.put(trajectory("b0", task="b", sample=0), 1)
  store.put(trajectory("b1", PAUSED, task="b", sample=1), 1)
  store.put(trajectory("c0", task="c", sample=0), 1)
  store.put(trajectory("c1", EXCLUDED, task="c", sample=1), 1)
  store.put(trajectory("d0", task="d", sample=0), 1)
  assert ids(store.finished_unconsumed(1, 2)) == [["a0", "a1"], ["c0"]]
  assert [t.id for t in store.paused(1)] == ["b1"]
  store.put(trajectory("b1", task="b", sample=1), 2)
  assert ids(store.finished_unconsumed(2, 2)) == [["a0", "a1"], ["b0", "b1"], ["c0"]]
  store.consume(["a0", "a1"], 2)
  assert ids(store.finished_unconsumed(2, 2)) == [["b0", "b1"], ["c0"]]


def test_the_same_task_in_two_steps_is_two_groups(store):
  store.put(trajectory("x", sample=0), 1)
  store.put(trajectory("y", sample=0), 2)
  assert ids(store.finished_unconsumed(2, 1)) == [["x"], ["y"]]
  assert store.finished_unconsumed(2, 2) == []


def test_a_restored_step_does_not_see_what_later_steps_wrote(store):
  store.put(trajectory("a", task="a"), 1)
  store.put(trajectory("b", PAUSED, task="b"), 1)
  store.put(trajectory("b", task="b"), 3)
  store.put(trajectory("c", PAUSED, task="c"), 3)
  assert ids(store.finished_unconsumed(2, 1)) == [["a"]]
  assert store.paused(2) == []
  assert ids(store.finished_unconsumed(3, 1)) == [["a"], ["b"]]
  assert [t.id for t in store.paused(3)] == ["c"]


def test_none_is_trained_twice_and_a_refusal_changes_nothing(store):
  for id in "abc":
    store.put(trajectory(id, sample=ord(id)), 1)
  store.put(trajectory("p", PAUSED, sample=1), 1)
  store.consume(["a"], 4)
  for bad, message in [(["b", "a"], "step 4 trained it already"), (["b", "b"], "step 5 trained it"),
                       (["b", "p"], "it is paused"), (["b", "z"], "does not hold it")]:
    with pytest.raises(buffer.BufferError, match=message):
      store.consume(bad, 5)
    assert store.rows(["b"])["b"].consumed_step is None
  store.consume(["b", "c"], 5)
  assert store.counts()["consumed"] == 3


def test_rewind_gives_back_what_later_steps_trained(store):
  for step, id in enumerate("abcd", 1):
    store.put(trajectory(id, task=id), step)
    store.consume([id], step)
  assert store.rewind(2) == 2
  assert store.rewind(2) == 0
  assert ids(store.finished_unconsumed(4, 1)) == [["c"], ["d"]]
  store.consume(["c"], 3)


def test_what_begins_is_stored_as_paused_and_what_is_there_already_stays(store):
  store.put(trajectory("a"), 1)
  store.begin([trajectory("a", PAUSED, tokens=9), trajectory("b", PAUSED)], 2)
  assert store.rows("ab") == {"a": buffer.Row("finished", 1, 1, None),
                              "b": buffer.Row("paused", 2, 2, None)}
  assert store.put(trajectory("b"), 4, made=9)
  assert store.rows("b") == {"b": buffer.Row("finished", 2, 4, None)}
  assert store.put(trajectory("c"), 4, made=3)
  assert store.rows("c") == {"c": buffer.Row("finished", 3, 4, None)}


def test_a_decided_step_leaves_what_is_paused_to_the_next_one(store):
  store.put(trajectory("a", PAUSED), 1)
  store.put(trajectory("b", PAUSED, sample=1), 3)
  store.put(trajectory("c", sample=2), 1)
  store.decide(1)
  store.decide(1)
  assert store.decided(1) and not store.decided(2)
  assert store.paused(1) == [] and [t.id for t in store.paused(2)] == ["a"]
  assert store.rows("bc") == {"b": buffer.Row("paused", 3, 3, None),
                              "c": buffer.Row("finished", 1, 1, None)}


def test_counts_and_all_by_step(store):
  store.put(trajectory("a", sample=0), 1)
  store.put(trajectory("b", PAUSED, sample=1), 1)
  store.put(trajectory("c", EXCLUDED), 2)
  store.put(trajectory("b", sample=1), 2)
  store.consume(["a"], 2)
  assert store.counts(1) == {"paused": 0, "finished": 1, "excluded": 0, "consumed": 1}
  assert store.counts(2) == {"paused": 0, "finished": 1, "excluded": 1, "consumed": 0}
  assert store.counts() == {"paused": 0, "finished": 2, "excluded": 1, "consumed": 1}
  assert [t.id for t in store.all(1)] == ["a", "b"]


def test_it_stays_after_closing(tmp_path):
  with buffer.ReplayBuffer(tmp_path / "new" / "buffer.db") as store:
    store.put(trajectory("a"), 1)
  with buffer.ReplayBuffer(tmp_path / "new" / "buffer.db") as store:
    assert store.rows(["a"])["a"].state == "finished"


def test_more_ids_than_one_statement_takes(store):
  for i in range(3):
    store.put(trajectory(str(i * 600), sample=i), 1)
  assert set(store.rows(map(str, range(1300)))) == {"0", "600", "1200"}


def test_a_second_owner_is_told_who_has_it(store):
  with pytest.raises(buffer.BufferError, match=f"another process \\(pid {os.getpid()}\\)"):
    buffer.ReplayBuffer(store.path)
  store.close()
  store.close()
  buffer.ReplayBuffer(store.path).close()


def run_child(tmp_path, body):
  """Starts `body` in a process with `store` open on buffer.db and `trajectory` at hand."""
  code = (f"import sys; sys.path[:0] = {[ROOT, str(pathlib.Path(__file__).parent)]!r}\n"
          "from test_buffer import *\n"
          f"store = buffer.ReplayBuffer({str(tmp_path / 'buffer.db')!r})\n" + body)
  return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def kill_after(child, lines):
  seen = [child.stdout.readline().strip() for _ in range(lines)]
  child.send_signal(signal.SIGKILL)
  seen += child.stdout.read().split()  # what it still printed before it died
  child.wait()
  assert child.returncode == -signal.SIGKILL
  return seen


def test_kill_9_loses_no_finished_trajectory(tmp_path):
  child = run_child(tmp_path, """
for i in range(10**6):
  store.put(trajectory(str(i), sample=i, tokens=500), 1)
  print(i, flush=True)
""")
  seen = kill_after(child, 40)
  with buffer.ReplayBuffer(tmp_path / "buffer.db") as store:
    assert set(store.rows(seen)) == set(seen)
    for id in seen:
      assert store.get(id).sampled_tokens == 500
    assert len(store.all(1)) <= len(seen) + 1


def test_kill_9_leaves_each_consume_whole_or_undone(tmp_path):
  with buffer.ReplayBuffer(tmp_path / "buffer.db") as store:
    for i in range(400):
      store.put(trajectory(str(i), sample=i), 1)
  child = run_child(tmp_path, """
for step in range(1, 10**6):
  store.consume([str(i) for i in range(400)], step)
  print(step, flush=True)
  store.rewind(step - 1)
""")
  kill_after(child, 5)
  with buffer.ReplayBuffer(tmp_path / "buffer.db") as store:
    assert store.counts()["consumed"] in (0, 400)
    store.rewind(0)
    store.consume(map(str, range(400)), 1)


def test_a_damaged_file_says_what_to_do(tmp_path):
  path = tmp_path / "buffer.db"
  path.write_bytes(b"this is not a database, " * 100)
  with pytest.raises(buffer.BufferError, match="damaged .* Move .* away and start again"):
    buffer.ReplayBuffer(path)
  path.unlink()
  buffer.ReplayBuffer(path).close()  # the refusal held no lock


def test_damage_inside_the_file_is_found_at_opening(tmp_path):
  path = tmp_path / "buffer.db"
  with buffer.ReplayBuffer(path) as store:
    for i in range(200):
      store.put(trajectory(str(i), sample=i), 1)
  data = bytearray(path.read_bytes())
  for page in range(4096 * 3, len(data), 4096):
    data[page:page + 64] = b"\xff" * 64
  path.write_bytes(data)
  with pytest.raises(buffer.BufferError, match="damaged"):
    buffer.ReplayBuffer(path)


@pytest.mark.parametrize("payload", [b"no zlib", zlib.compress(b"{no json")])
def test_a_payload_that_does_not_decode_is_damage(store, payload):
  store.put(trajectory("a"), 1)
  store._db.execute("UPDATE trajectories SET payload = ?", (payload,))
  with pytest.raises(buffer.BufferError, match="damaged"):
    store.get("a")


def test_another_format_is_refused(tmp_path):
  path = tmp_path / "buffer.db"
  with sqlite3.connect(path) as db:
    db.execute("PRAGMA user_version = 9")
  with pytest.raises(buffer.BufferError, match="another version of kr"):
    buffer.ReplayBuffer(path)


def test_a_full_disk_is_named_and_keeps_what_was_stored(store):
  store.put(trajectory("a"), 1)
  pages = store._db.execute("PRAGMA page_count").fetchone()[0]
  store._db.execute(f"PRAGMA max_page_count = {pages}")
  with pytest.raises(buffer.BufferError, match="disk is full: free some space"):
    for i in range(100):
      store.put(trajectory(f"b{i}", sample=i, tokens=1000), 1)
  store._db.execute("PRAGMA max_page_count = 100000")
  assert store.get("a") is not None
  store.put(trajectory("c"), 1)


def test_a_directory_that_cannot_be_made_says_so(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(buffer.BufferError, match="Choose a workdir that can be written"):
    buffer.ReplayBuffer(tmp_path / "file" / "buffer.db")


def test_payloads_are_plain_json(store):
  store.put(trajectory("a"), 1)
  payload = store._db.execute("SELECT payload FROM trajectories").fetchone()[0]
  assert json.loads(zlib.decompress(payload))["id"] == "a"
