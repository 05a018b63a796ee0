"""Several inference servers as one policy, with the methods of a `PolicyClient`.

A new trajectory goes to the server with the fewest requests in flight, and its turns stay where
its prefix is cached. When a server dies, its requests are sampled again elsewhere, from their
tokens; it serves again once it holds the current policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
import collections
import logging
import pathlib
from typing import Any

from kr.agent.policy import ContextOverflow, OffPolicyError, PolicyClient, PolicyError, Sampled

_MISSES = 2  # unanswered health checks in a row, until a server counts as dead
_SLACK = 4  # requests that a trajectory's own server may have above twice the least, see `_place`
_HOMES = 100_000  # trajectories whose server is remembered
_ABORT_S = 5.0

_log = logging.getLogger("kr.fleet")

Call = Callable[[PolicyClient], Awaitable[Any]]


class _Lost(Exception):
  """The server died under a request, or serves an older policy."""


class _Server:
  """A client, and what the fleet knows of its server.

  lost: done as soon as the server is out of service. requests, tokens: in flight there.
  """

  def __init__(self, client: PolicyClient):
    self.client = client
    self.url = client.url
    self.up = True
    self.lost: asyncio.Future[None] | None = None
    self.requests = self.tokens = self.misses = 0
    self.stays_out = ""  # why it was not taken back, the last time


class Fleet:
  """The policy behind several servers; use it within one event loop.

  check_s: between two looks at whether a server lives. wait_s: how long requests wait when no
  server is left, before they fail; make it longer than a server takes to start. router: one
  address before the servers that spreads the requests itself, such as sglang-router's. What
  every server must hear of (policies, pauses, aborts) no router hands on: that goes to each.
  """

  def __init__(self, clients: Sequence[PolicyClient], *, router: PolicyClient | None = None,
               check_s: float = 1.0, wait_s: float = 120.0):
    if not clients:
      raise ValueError("a fleet needs at least one server")
    self._servers = [_Server(client) for client in clients]
    self._router = router
    self._check_s, self._wait_s = check_s, wait_s
    self._homes: collections.OrderedDict[str, _Server] = collections.OrderedDict()
    self._path: str | None = None  # where the current policy lies, once that is known
    self._version: int | None = None
    self._paused = False
    self._checked: tuple[Any, ...] | None = None  # what `check_on_policy` was called with
    self._any_up = asyncio.Event()
    self._lock = asyncio.Lock()  # one look at versions, or change of them, at a time
    self._tasks: set[asyncio.Future[Any]] = set()
    self._begun = False

  # Sampling and scoring.

  async def generate(self, ids: Sequence[int], *, max_new_tokens: int, stop_ids: Sequence[int],
                     rid: str, temperature: float | None = None) -> Sampled:
    """`PolicyClient.generate` on the server of the trajectory that `rid` names.

    rid: "<trajectory>.<turn>.<attempt>." Raises PolicyError when no server is left, or when
    each one failed.
    """
    return await self._send(ids, rid, lambda client: client.generate(
        ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids, rid=rid, temperature=temperature))

  async def score(self, ids: Sequence[int], rid: str | None = None) -> list[float]:
    """`PolicyClient.score` on some server."""
    return await self._send(ids, rid, lambda client: client.score(ids, rid))

  async def _send(self, ids: Sequence[int], rid: str | None, call: Call) -> Any:
    await self._agree()
    if self._router is not None:
      return await self._routed(rid, call)
    trajectory = rid.rsplit(".", 3)[0] if rid else None
    failed: dict[_Server, PolicyError] = {}
    while True:
      free = [s for s in self._servers if s.up and s not in failed]
      if not free:
        if failed:
          raise list(failed.values())[-1]
        await self._wait_up()
        continue
      server, version = self._place(trajectory, free), self._version
      try:
        result = await self._on(server, call, len(ids))
      except _Lost:
        continue
      except ContextOverflow:
        raise
      except PolicyError as e:  # The server lives, but cannot do it: perhaps another one can.
        failed[server] = e
        continue
      if not _older(result, version):
        return result
      self._drop(server, f"it samples from version {result.version} of the policy, after "
                         f"version {version} was published: has it been restarted?")

  def _place(self, trajectory: str | None, free: Sequence[_Server]) -> _Server:
    """The server for a request: the trajectory's own, unless it is far busier than another.

    Moving costs computing the prefix again; staying costs waiting, for ever if all trajectories
    once fled to one server.
    """
    server = least = min(free, key=lambda s: (s.requests, s.tokens))
    home = self._homes.pop(trajectory, None)
    if home in free and home.requests <= 2 * least.requests + _SLACK:
      server = home
    if trajectory is not None:
      self._homes[trajectory] = server
      if len(self._homes) > _HOMES:
        self._homes.popitem(last=False)
    return server

  async def _routed(self, rid: str | None, call: Call) -> Any:
    """What `call` returns through the router."""
    while True:
      await self._wait_up()
      version = self._version
      try:
        result = await call(self._router)
      except asyncio.CancelledError:
        if rid:  # the router does not hand on the client's own abort
          await asyncio.shield(self._all(lambda client: client.abort(rid)))
        raise
      if not _older(result, version):
        return result
      for server, held in (await self._each(_version)).items():  # the router does not say which
        if held != self._version:
          self._drop(server, f"it holds version {held} of the policy")
      await asyncio.sleep(self._check_s)

  async def _on(self, server: _Server, call: Call, tokens: int = 0) -> Any:
    """What `call` returns from the server; raises _Lost as soon as that is out of service."""
    server.requests += 1
    server.tokens += tokens
    task = asyncio.ensure_future(call(server.client))
    try:
      await asyncio.wait({task, server.lost}, return_when=asyncio.FIRST_COMPLETED)
      if not task.done():
        raise _Lost
      return task.result()
    except ContextOverflow:
      raise
    except PolicyError as e:
      if await server.client.healthy():
        raise
      self._drop(server, str(e))
      raise _Lost from e
    except asyncio.CancelledError:
      task.cancel()  # The client then aborts the request.
      await asyncio.wait({task}, timeout=_ABORT_S)
      raise
    finally:
      server.requests -= 1
      server.tokens -= tokens
      if not task.done():
        task.cancel()
        self._keep(task)  # It says goodbye to a server that may never answer: nobody waits.

  # The servers' state.

  async def info(self) -> dict[str, Any]:
    """What the first server in service says of itself; `servers` has all of them by address."""
    await self._agree()
    infos = await self._each(lambda client: client.info())
    if not infos:
      raise PolicyError("no inference server is left")
    return {**next(iter(infos.values())), "servers": {s.url: i for s, i in infos.items()}}

  async def check_on_policy(self, probe: Sequence[int] = (1,), tolerance: float | None = None
                            ) -> dict[str, Any]:
    """`PolicyClient.check_on_policy` on every server, now and whenever one comes back.

    Raises OffPolicyError naming the server. Returns the largest gap.
    """
    self._checked = probe, tolerance
    await self._agree()

    async def check(client: PolicyClient) -> dict[str, Any]:
      try:
        return await client.check_on_policy(probe, tolerance)
      except OffPolicyError as e:
        raise OffPolicyError(f"{client.url}: {e}") from e

    found = (await self._each(check)).values()
    return {"logprob_gap": max((f["logprob_gap"] for f in found), default=0.0),
            "reports_version": all(f["reports_version"] for f in found)}

  async def update_weights(self, path: str | pathlib.Path, version: int) -> None:
    """Publishes the policy in `path` as `version` on every server.

    None samples again before all have it. A dead server gets it when it comes back. Raises
    PolicyError naming the servers that refused it: they are out of service until they hold
    it, unless all refused, which then go on with the policy that they have.
    """
    await self._begin()
    await self._wait_up()
    async with self._lock:
      was_paused, refused = self._paused, {}
      try:
        if not was_paused:
          refused |= _errors(await self._all(lambda client: client.pause()))
        refused |= _errors(await self._all(
            lambda client: client.update_weights(path, version), without=refused))
        if not refused or any(s.up and s not in refused for s in self._servers):
          self._path, self._version = str(path), version
          for server, error in refused.items():
            self._drop(server, str(error))
      finally:
        if not was_paused:
          refused |= _errors(await self._all(lambda client: client.resume()))
    if refused:
      raise PolicyError(f"policy version {version} was not published to " + _reasons(refused))
    await self._wait_up()  # Should all have died of it: one comes back with the new policy.

  def moved(self, path: str | pathlib.Path) -> None:
    """The current policy lies here now: servers that come back read it from here."""
    self._path = str(path)

  async def pause(self, mode: str = "retract") -> None:
    """Stops generation on every server, also on those that come back meanwhile."""
    self._paused = True
    await self._must_all(lambda client: client.pause(mode), "paused")

  async def resume(self) -> None:
    """Continues after `pause`."""
    self._paused = False
    await self._must_all(lambda client: client.resume(), "resumed")

  async def abort(self, rid: str | None = None) -> None:
    """Aborts one request, or all, on whatever server they are."""
    await self._must_all(lambda client: client.abort(rid), "aborted")

  async def flush(self) -> None:
    """Empties every server's cache."""
    await self._must_all(lambda client: client.flush(), "flushed")

  async def healthy(self) -> bool:
    """Whether a server answers."""
    return any(await asyncio.gather(*(s.client.healthy() for s in self._servers)))

  async def aclose(self) -> None:
    """Ends the watch and closes the connections."""
    tasks = list(self._tasks)
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    clients = [s.client for s in self._servers] + ([self._router] if self._router else [])
    await asyncio.gather(*(client.aclose() for client in clients))

  # Calls to all servers in service.

  async def _all(self, call: Call, without: Collection[_Server] = ()) -> dict[_Server, Any]:
    """What `call` returns on each server, or its PolicyError; those that die are left out."""
    up = [s for s in self._servers if s.up and s not in without]
    results = await asyncio.gather(*(self._on(s, call) for s in up), return_exceptions=True)
    for result in results:
      if isinstance(result, BaseException) and not isinstance(result, (_Lost, PolicyError)):
        raise result
    return {s: r for s, r in zip(up, results) if not isinstance(r, _Lost)}

  async def _each(self, call: Call) -> dict[_Server, Any]:
    """`_all`, but an error is raised."""
    results = await self._all(call)
    for error in _errors(results).values():
      raise error
    return results

  async def _must_all(self, call: Call, done: str) -> None:
    await self._begin()
    if refused := _errors(await self._all(call)):
      raise PolicyError(f"not every server was {done}: " + _reasons(refused))

  # Who is in service.

  async def _begin(self) -> None:
    """Looks which servers live, and starts to watch them; once."""
    if self._begun:
      return
    async with self._lock:
      if self._begun:
        return
      for server in self._servers:
        server.lost = asyncio.get_running_loop().create_future()
      lives = await asyncio.gather(*(s.client.healthy() for s in self._servers))
      self._any_up.set()
      for server, well in zip(self._servers, lives):
        if not well:
          self._drop(server, "it does not answer")
        self._keep(asyncio.create_task(self._watch(server)))
      self._begun = True

  async def _agree(self) -> None:
    """Finds out, before the first request, which version all servers hold.

    Raises PolicyError when they hold different ones.
    """
    await self._begin()
    while self._version is None:
      await self._wait_up()
      async with self._lock:
        held = await self._each(_version) if self._version is None else {}
      if len(set(held.values())) > 1:
        raise PolicyError(
            "the inference servers hold different versions of the policy (" +
            ", ".join(f"{server.url}: {version}" for server, version in held.items()) +
            "): publish one to all of them before the first request, or start them with the same")
      if self._version is None and held:
        self._version = next(iter(held.values()))

  async def _wait_up(self) -> None:
    """Returns when a server is in service. Raises PolicyError when that takes too long."""
    try:
      await asyncio.wait_for(self._any_up.wait(), self._wait_s)
    except asyncio.TimeoutError:
      raise PolicyError(
          f"no inference server has come back for {self._wait_s:g} s: start one of "
          f"{', '.join(s.url for s in self._servers)}") from None

  def _drop(self, server: _Server, why: str) -> None:
    """Takes a server out of service; who waits for it goes elsewhere."""
    if server.up:
      _log.warning("inference server %s is out of service: %s", server.url, why)
      server.up = False
      server.lost.set_result(None)
      if not any(s.up for s in self._servers):
        self._any_up.clear()

  async def _watch(self, server: _Server) -> None:
    while True:
      await asyncio.sleep(self._check_s)
      well = await server.client.healthy()
      server.misses = 0 if well else server.misses + 1
      if server.misses >= _MISSES:
        self._drop(server, "it does not answer")
      elif well and not server.up:
        try:
          async with self._lock:
            await self._admit(server)
        except (PolicyError, OffPolicyError) as e:
          if str(e) != server.stays_out:
            _log.warning("inference server %s stays out of service: %s", server.url, e)
          server.stays_out = str(e)

  async def _admit(self, server: _Server) -> None:
    """Gives a server the current policy, and takes it into service."""
    client = server.client
    await client.pause()  # It may have started anew, and knows of no pause.
    if self._path is not None and self._version is not None:
      await client.update_weights(self._path, self._version)
    elif self._version not in (None, held := await _version(client)):
      raise PolicyError(f"it holds version {held} of the policy, not {self._version}; restart it "
                        "with that one")
    await client.resume()
    if self._checked is not None:
      await client.check_on_policy(*self._checked)
    if self._paused:
      await client.pause()
    server.up, server.misses = True, 0
    server.lost = asyncio.get_running_loop().create_future()
    self._any_up.set()
    _log.warning("inference server %s is in service", server.url)

  def _keep(self, task: asyncio.Future[Any]) -> None:
    """Keeps a task that nobody waits for, and logs the error that it may end with."""
    def done(task: asyncio.Future[Any]) -> None:
      self._tasks.discard(task)
      if not task.cancelled() and (error := task.exception()):
        _log.log(logging.INFO if isinstance(error, PolicyError) else logging.ERROR, "%r", error)

    self._tasks.add(task)
    task.add_done_callback(done)


def _older(result: Any, version: int) -> bool:
  """Whether a turn was sampled by a policy older than the one at the time of its request."""
  return isinstance(result, Sampled) and result.finish != "abort" and result.version < version


async def _version(client: PolicyClient) -> int:
  """The version of the policy that a server reports; 0 for the one that it started with."""
  version = (await client.info()).get("weight_version")
  try:
    return 0 if version in (None, "default") else int(version)
  except ValueError:
    raise PolicyError(f"{client.url} reports weight version {version!r}; kr numbers versions: "
                      "start the server with --weight-version=0") from None


def _errors(results: dict[_Server, Any]) -> dict[_Server, PolicyError]:
  return {server: r for server, r in results.items() if isinstance(r, PolicyError)}


def _reasons(errors: dict[_Server, PolicyError]) -> str:
  return "; ".join(f"{server.url} ({error})" for server, error in errors.items())
