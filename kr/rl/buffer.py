"""The replay buffer: every trajectory of a run, durable in one SQLite file.

A trajectory is in one of three states: `paused` (its remaining turns are to be run),
`finished` (final), `excluded` (an infrastructure failure; it may be run again). Rows carry
the step that first made them, the step that last wrote them and, once trained, the step that
consumed them.

Durable: WAL with synchronous=FULL, one transaction a call. What `put` and `consume` have
returned from survives kill -9 and a power cut.

After a restore of checkpoint s, rows that a later step wrote are in the buffer's future: each
read takes the reader's `step` and does not show them before that step comes again. So a
repeated step trains what it trained the first time, under the weights that sampled it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kr import types

_SCHEMA = """
CREATE TABLE IF NOT EXISTS trajectories (
  id TEXT PRIMARY KEY,
  step_made INTEGER NOT NULL,
  step_written INTEGER NOT NULL,
  task TEXT NOT NULL,
  sample INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('paused', 'finished', 'excluded')),
  payload BLOB NOT NULL,
  consumed_step INTEGER);
CREATE INDEX IF NOT EXISTS groups ON trajectories (step_made, task, sample, state, step_written);
CREATE INDEX IF NOT EXISTS waiting ON trajectories (step_made, task, sample)
  WHERE state = 'finished' AND consumed_step IS NULL;
CREATE INDEX IF NOT EXISTS paused ON trajectories (step_made, task, sample)
  WHERE state = 'paused';
CREATE TABLE IF NOT EXISTS decided (step INTEGER PRIMARY KEY);
"""
_FORMAT = 1  # PRAGMA user_version
_IN_SQL = 500  # ids in one statement; SQLite allows 32,766
_ORDER = " ORDER BY step_made, task, sample"


class BufferError(Exception):
  """The buffer cannot be read, written or had alone; the text says what to do."""


class Row(NamedTuple):
  """Where a trajectory stands. `consumed_step` is None until it is trained."""
  state: str
  step_made: int
  step_written: int
  consumed_step: int | None


class ReplayBuffer:
  """Opens or creates the buffer at `path`, alone: a second process gets a BufferError.

  The lock is the operating system's, on `path`.lock, and ends with the process, however that
  dies. Every method raises BufferError for a full disk or a damaged file.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = os.path.abspath(os.fspath(path))
    self._lock = _lock(self.path)
    try:
      with self._errors():
        self._db = sqlite3.connect(self.path, isolation_level=None)
        self._open()
    except BaseException:
      self._lock.close()
      raise

  def put(self, trajectory: types.Trajectory, step: int, made: int | None = None) -> bool:
    """Stores a trajectory that ended or paused in `step`; returns whether anything changed.

    Idempotent by id: what is finished stays as it is, whatever comes after. `made` is the step
    that made it when the id is new (None: `step`).
    """
    if trajectory.stop is None:
      raise ValueError(f"trajectory {trajectory.id} is still running: it has no stop reason")
    state = {types.StopReason.PAUSED: "paused",
             types.StopReason.INFRASTRUCTURE: "excluded"}.get(trajectory.stop, "finished")
    payload = _encode(trajectory)
    with self._errors():
      cursor = self._db.execute(
          "INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, NULL) ON CONFLICT (id) DO UPDATE "
          "SET state = excluded.state, payload = excluded.payload, "
          "step_written = excluded.step_written WHERE trajectories.state != 'finished'",
          (trajectory.id, step if made is None else made, step, trajectory.task.id,
           trajectory.sample, state, payload))
    return cursor.rowcount > 0

  def begin(self, trajectories: Iterable[types.Trajectory], step: int) -> None:
    """Stores as paused what `step` is about to run from its start, unless its id is there.

    What was excluded is paused again: its group waits for it.
    """
    with self._errors(), self._transaction():
      self._db.executemany(
          "INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, 'paused', ?, NULL) ON CONFLICT (id) DO "
          "UPDATE SET state = 'paused', payload = excluded.payload, "
          "step_written = excluded.step_written WHERE trajectories.state = 'excluded'",
          ((t.id, step, step, t.task.id, t.sample, _encode(t)) for t in trajectories))

  def decide(self, step: int) -> None:
    """Fixes what `step` trains: what is paused is left to the step after it.

    Call it when `step` has enough. From here on a repeated `step` runs nothing, neither what was
    paused nor what was excluded, and so trains the same.
    """
    with self._errors(), self._transaction():
      self._db.execute("INSERT OR IGNORE INTO decided VALUES (?)", (step,))
      self._db.execute("UPDATE trajectories SET step_written = ? WHERE state = 'paused' AND "
                       "step_written <= ?", (step + 1, step))

  def decided(self, step: int) -> bool:
    """Whether it is fixed what `step` trains."""
    with self._errors():
      return bool(self._db.execute("SELECT 1 FROM decided WHERE step = ?", (step,)).fetchone())

  def get(self, id: str) -> types.Trajectory | None:
    """The stored trajectory, or None."""
    return next(iter(self._load("WHERE id = ?", (id,))), None)

  def rows(self, ids: Iterable[str]) -> dict[str, Row]:
    """Where each of `ids` stands; ids that are not stored are left out."""
    ids, found = list(ids), {}
    for start in range(0, len(ids), _IN_SQL):
      part = ids[start:start + _IN_SQL]
      with self._errors():
        found.update((id, Row(*row)) for id, *row in self._db.execute(
            "SELECT id, state, step_made, step_written, consumed_step FROM trajectories "
            f"WHERE id IN ({','.join('?' * len(part))})", part))
    return found

  def paused(self, step: int) -> list[types.Trajectory]:
    """Trajectories whose remaining turns are to be run, the oldest first."""
    return self._load("WHERE state = 'paused' AND step_written <= ?" + _ORDER, (step,))

  def finished_unconsumed(self, step: int, group_size: int) -> list[list[types.Trajectory]]:
    """The complete groups that wait for training, in a fixed order.

    A group is what one step made of one task. It is complete when `group_size` members ended
    by `step`; only the finished ones of them are returned, so that a group that lost members to
    infrastructure failures is smaller. Each finished trajectory carries
    `meta["step_made"]`, which with its task's id names its group.
    """
    found = self._load(
        "AS t WHERE state = 'finished' AND consumed_step IS NULL AND ("
        "SELECT SUM(state != 'paused' AND step_written <= ?) FROM trajectories AS g "
        "WHERE g.step_made = t.step_made AND g.task = t.task) >= ?" + _ORDER, (step, group_size))
    groups: dict[tuple[int, str], list[types.Trajectory]] = {}
    for trajectory in found:
      groups.setdefault((trajectory.meta["step_made"], trajectory.task.id), []).append(trajectory)
    return list(groups.values())

  def consume(self, ids: Iterable[str], step: int) -> None:
    """Marks trajectories as trained by `step`: all of them, or none and a BufferError.

    This is what keeps any from being trained twice: it refuses an id that is consumed
    already, listed twice, not finished or unknown. Call it before the update is
    checkpointed; after a crash in between, `rewind` gives them back.
    """
    with self._errors(), self._transaction():
      for id in ids:
        cursor = self._db.execute(
            "UPDATE trajectories SET consumed_step = ? "
            "WHERE id = ? AND state = 'finished' AND consumed_step IS NULL", (step, id))
        if cursor.rowcount != 1:
          raise BufferError(f"trajectory {id} cannot be trained in step {step}: {self._why(id)}")

  def rewind(self, step: int) -> int:
    """Un-consumes what steps after `step` trained; returns how many rows that were.

    Call it with the step of the restored checkpoint (0, or the step before the first, when
    there is none).
    """
    with self._errors():
      return self._db.execute("UPDATE trajectories SET consumed_step = NULL "
                              "WHERE consumed_step > ?", (step,)).rowcount

  def counts(self, step: int | None = None) -> dict[str, int]:
    """Rows by state, and `consumed`; of those that `step` last wrote, or of all."""
    where, values = ("", ()) if step is None else ("WHERE step_written = ?", (step,))
    result = {"paused": 0, "finished": 0, "excluded": 0, "consumed": 0}
    with self._errors():
      for state, rows, consumed in self._db.execute(
          f"SELECT state, COUNT(*), COUNT(consumed_step) FROM trajectories {where} GROUP BY state",
          values):
        result[state] = rows
        result["consumed"] += consumed
    return result

  def all(self, step: int) -> list[types.Trajectory]:
    """Every trajectory that `step` made, in whatever state, for reports."""
    return self._load("WHERE step_made = ?" + _ORDER, (step,))

  def close(self) -> None:
    """Closes the file and gives up the lock; a second call does nothing."""
    self._db.close()
    self._lock.close()

  def __enter__(self) -> "ReplayBuffer":
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _open(self) -> None:
    if self._db.execute("PRAGMA quick_check").fetchone()[0] != "ok":
      raise sqlite3.DatabaseError("quick_check failed")
    version = self._db.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, _FORMAT):
      raise BufferError(f"{self.path} was written by another version of kr (format {version}, "
                        f"this one is {_FORMAT}): use another workdir, or that version")
    self._db.execute("PRAGMA journal_mode = WAL")
    self._db.execute("PRAGMA synchronous = FULL")
    self._db.executescript(_SCHEMA)
    self._db.execute(f"PRAGMA user_version = {_FORMAT}")

  def _load(self, where: str, values: tuple) -> list[types.Trajectory]:
    result = []
    with self._errors():
      for step_made, payload in self._db.execute(
          "SELECT step_made, payload FROM trajectories " + where, values):
        trajectory = types.Trajectory.from_json(json.loads(zlib.decompress(payload)))
        trajectory.meta["step_made"] = step_made
        result.append(trajectory)
    return result

  def _why(self, id: str) -> str:
    row = self.rows([id]).get(id)
    if row is None:
      return "the buffer does not hold it"
    if row.consumed_step is not None:
      return f"step {row.consumed_step} trained it already"
    return f"it is {row.state}, not finished"

  @contextlib.contextmanager
  def _transaction(self) -> Iterator[None]:
    self._db.execute("BEGIN IMMEDIATE")
    try:
      yield
      self._db.execute("COMMIT")
    except BaseException:
      if self._db.in_transaction:  # a full disk may have rolled back by itself
        self._db.execute("ROLLBACK")
      raise

  @contextlib.contextmanager
  def _errors(self) -> Iterator[None]:
    """Turns SQLite's errors, and payloads that do not decode, into BufferErrors."""
    try:
      yield
    except (sqlite3.ProgrammingError, sqlite3.IntegrityError):
      raise  # a bug of ours, not the file's state
    except sqlite3.OperationalError as e:
      # Near the end of a disk SQLite cannot grow its shared memory and says "disk I/O error".
      if "full" in str(e) or shutil.disk_usage(os.path.dirname(self.path)).free < 2 ** 20:
        advice = ("the disk is full: free some space and start the same command again; all that "
                  "was stored before is kept")
      else:
        advice = f"{e}: check that its directory can be written, then start again"
      raise BufferError(f"cannot use the replay buffer {self.path}: {advice}") from e
    except (sqlite3.DatabaseError, zlib.error, json.JSONDecodeError, UnicodeDecodeError) as e:
      raise BufferError(
          f"the replay buffer {self.path} is damaged ({e}). Move {self.path} and its -wal and "
          "-shm files away and start again: the run goes on from its last checkpoint, and only "
          "trajectories that were not trained yet are lost") from e


def _encode(trajectory: types.Trajectory) -> bytes:
  return zlib.compress(json.dumps(trajectory.to_json()).encode(), 3)


def _lock(path: str):
  """Holds `path`.lock for this process, or raises BufferError; closing the file frees it."""
  try:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    file = open(path + ".lock", "ab+", buffering=0)
  except OSError as e:
    raise BufferError(f"cannot create the replay buffer {path}: {e.strerror}. Choose a workdir "
                      "that can be written") from e
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as e:
    file.seek(0)
    holder = file.read().decode().strip() or "unknown"
    file.close()
    raise BufferError(f"another process (pid {holder}) is using the replay buffer {path}: wait "
                      "for it or stop it, or choose another workdir") from e
  file.truncate(0)
  with contextlib.suppress(OSError):  # the number is for the message alone; the disk may be full
    file.write(str(os.getpid()).encode())
  return file
