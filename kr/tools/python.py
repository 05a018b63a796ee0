"""The `python` tool: model-written code in a sandbox, with variables that survive between calls."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
from typing import Any

from kr.tools import sandbox
from kr.tools.base import ToolSpec, clean, clip
from kr.types import ToolResult

_MAX_CODE_CHARS = 20_000


@dataclasses.dataclass
class _Session:
  worker: sandbox.Worker | None = None
  lost: bool = False            # earlier variables are gone and the policy has not been told
  busy: int = 0                 # calls that run or wait
  lock: asyncio.Lock | None = None
  loop: asyncio.AbstractEventLoop | None = None

  def turn(self) -> asyncio.Lock:
    """The lock that runs a session's calls one by one; a lock belongs to one event loop."""
    loop = asyncio.get_running_loop()
    if self.lock is None or self.loop is not loop:
      self.lock, self.loop = asyncio.Lock(), loop
    return self.lock


class Python:
  """Runs code in the session's own sandboxed worker, which starts on first use.

  The observation is what the code prints, then the value of a last expression, then the error.
  After `wall_s` seconds, or when the process dies, the worker and its variables are gone and the
  observation says so. Beyond `max_workers` live workers, the one idle for longest is ended, and
  its session told at its next call. Raises SandboxUnavailable where code cannot be isolated.
  """

  def __init__(self, wall_s: float = 10.0, max_chars: int = 2000, max_workers: int = 32,
               limits: sandbox.Limits | None = None):
    sandbox.check()
    self.spec = ToolSpec(
        "python", "Runs Python code. Variables are kept; the last expression is shown.",
        {"type": "object", "additionalProperties": False, "required": ["code"],
         "properties": {"code": {"type": "string", "maxLength": _MAX_CODE_CHARS}}})
    self._wall_s, self._max_chars, self._max_workers = wall_s, max_chars, max_workers
    self._limits = dataclasses.replace(limits or sandbox.Limits(), output_chars=max_chars)
    # In the order of last use, so that the first idle one is the one to end.
    self._sessions: collections.OrderedDict[str, _Session] = collections.OrderedDict()
    self._threads = concurrent.futures.ThreadPoolExecutor(max_workers, "python-tool")
    self._undertaker = concurrent.futures.ThreadPoolExecutor(2, "python-tool-end")

  async def call(self, session_id: str, arguments: dict[str, Any]) -> ToolResult:
    session = self._sessions.setdefault(session_id, _Session())
    self._sessions.move_to_end(session_id)
    session.busy += 1
    try:
      async with session.turn():
        result = await self._run(session, clean(arguments["code"]))
    finally:
      session.busy -= 1
      self._trim()
    if session.lost:
      session.lost = False
      result.text = f"(earlier variables are lost)\n{result.text}"
    return ToolResult(clip(result.text, self._max_chars), ok=result.ok)

  async def _run(self, session: _Session, code: str) -> ToolResult:
    if session.worker is not None and not session.worker.alive:
      self._end(session)
    if session.worker is None:
      session.worker = sandbox.Worker(self._limits)
    try:
      ok, text = await asyncio.get_running_loop().run_in_executor(
          self._threads, session.worker.run, code, self._wall_s)
    except sandbox.WorkerLost as e:
      session.worker = None
      return ToolResult(f"{e}; variables are lost", ok=False)
    except asyncio.CancelledError:  # in mid-call: nobody will read the reply
      self._end(session)
      raise
    return ToolResult(text or "(no output)", ok=ok)

  def _end(self, session: _Session) -> concurrent.futures.Future | None:
    """Ends the session's worker, if any; the next call will say that variables are lost."""
    if session.worker is None:
      return None
    ended = self._undertaker.submit(session.worker.kill)
    session.worker, session.lost = None, True
    return ended

  def _trim(self) -> None:
    live = [s for s in self._sessions.values() if s.worker is not None]
    idle = [s for s in live if not s.busy]
    for session in idle[:max(0, len(live) - self._max_workers)]:
      self._end(session)

  def snapshot(self, session_id: str) -> dict[str, Any] | None:
    """Whether there are variables. They cannot be kept, but their loss can be told."""
    session = self._sessions.get(session_id)
    return {"used": True} if session and (session.worker is not None or session.lost) else None

  def restore(self, session_id: str, state: dict[str, Any]) -> None:
    session = self._sessions.setdefault(session_id, _Session())
    session.lost |= session.worker is None  # else it is this process's own, and still lives

  async def close(self, session_id: str) -> None:
    session = self._sessions.pop(session_id, None)
    ended = self._end(session) if session else None
    if ended is not None:
      await asyncio.wrap_future(ended)

  async def aclose(self) -> None:
    await asyncio.gather(*(self.close(session_id) for session_id in list(self._sessions)))
    self._threads.shutdown(wait=False)
    self._undertaker.shutdown(wait=False)
