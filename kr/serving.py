"""The inference servers of a run: started, watched, published to, and stopped with it.

`config.server` says which: one process or several (`count`), of kr.serve or SGLang (`kind`),
servers that others started (`urls`), or the engine inside the learner's process (kind
"colocated", see `kr.rl.colocated`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
import contextlib
import os
import pathlib
from typing import Any, TypeVar

from absl import logging
import ml_collections

from kr import wiring
from kr.agent.chat import Chat
from kr.agent.fleet import Fleet
from kr.agent.policy import PolicyClient
from kr.rl.server import ServerError, ServerProcess
from kr.tools.base import Toolbox

ConfigDict = ml_collections.ConfigDict
T = TypeVar("T")
WATCH_S = 0.5  # between two looks at whether a server lives


class Session:
  """A run's tools, chat and inference servers, made by `session`; `policy` is their client.

  policy: a PolicyClient, a Fleet of several, or a ColocatedClient. servers: the processes that
  this one started. exports: where their policies are put as Hugging Face directories, for
  servers that read no others. learner: whose policy a colocated engine takes; alternate: in turn,
  on the same devices. first: (path, version) to publish before anything, to others' servers.
  """

  def __init__(self, toolbox: Toolbox, chat: Chat, policy: Any, servers: Sequence[ServerProcess],
               max_restarts: int, *, exports: Any = None, learner: Any = None,
               alternate: bool = False, first: tuple[str, int] | None = None):
    self.toolbox, self.chat, self.policy, self.servers = toolbox, chat, policy, list(servers)
    self._max_restarts, self._exports, self._learner = max_restarts, exports, learner
    self._alternate, self._first = alternate, first

  def run(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
    """What `work(policy)` returns, run in an event loop of its own; call it once.

    A server that dies meanwhile is restarted on the policy that it served, `max_restarts`
    times; after that the work is cancelled and ServerError raised.
    """
    return asyncio.run(self._run(work))

  async def sleep(self) -> None:
    """Makes room for an update, if learner and engine share devices: nothing samples until
    `publish`."""
    if self._alternate:
      await self.policy.sleep()

  async def publish(self, policy_dir: str | os.PathLike, version: int) -> None:
    """Makes the servers serve a new policy, also after a restart. Raises PolicyError.

    A colocated engine takes it from the learner, and does not wait for it to lie on disk.
    """
    if self._learner is not None:
      if self._alternate:
        self._learner.park()
      await self.policy.update_weights(self._learner.policy, version)
      return
    served = str(policy_dir)
    if self._exports:
      served = await asyncio.to_thread(self._exports.add, policy_dir, version)
    for server in self.servers:  # if one dies from here on
      server.model, server.version = served, version
    await self.policy.update_weights(served, version)
    if self._exports:
      self._exports.keep(version)

  def moved(self, policy_dir: str | os.PathLike) -> None:
    """The policy that is served lies here now: this is where a restarted server reads it."""
    if self._exports or self._learner is not None:
      return  # an export stays where it is, and an engine reads none
    for server in self.servers:
      server.model = str(policy_dir)
    if isinstance(self.policy, Fleet):
      self.policy.moved(policy_dir)

  async def _run(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
    async def whole() -> T:
      if self._first:
        await self.policy.update_weights(*self._first)
      return await work(self.policy)

    worker = asyncio.ensure_future(whole())
    watches = [asyncio.ensure_future(self._watch(server)) for server in self.servers]
    try:
      await asyncio.wait({worker, *watches}, return_when=asyncio.FIRST_COMPLETED)
      if not worker.done():
        for watch in watches:
          if watch.done():
            watch.result()  # raises
      return worker.result()
    finally:
      for task in (worker, *watches):
        task.cancel()
      await asyncio.gather(worker, *watches, return_exceptions=True)
      await self.policy.aclose()
      await self.toolbox.aclose()

  async def _watch(self, server: ServerProcess) -> None:
    while True:
      await asyncio.sleep(WATCH_S)
      if server.alive():
        continue
      if server.restarts >= self._max_restarts:
        raise ServerError(f"the inference server died {server.restarts + 1} times; its log "
                          "says why. The same command goes on from what is saved")
      logging.warning("the inference server died; restarting it")
      try:
        await asyncio.to_thread(server.restart)
      except ServerError as e:  # it died again before it was ready: that is one restart gone
        logging.warning("%s", e)


@contextlib.contextmanager
def session(config: ConfigDict, workdir: wiring.Workdir, policy_dir: pathlib.Path,
            version: int = 0, learner: Any = None) -> Iterator[Session]:
  """Starts the inference servers on a policy, and stops them at the end, however that comes.

  Whatever is the user's to fix in the tools and the chat is found before a server starts.
  version: what the servers report for this policy. learner: what a colocated engine is beside.
  Without one (evaluation), a server of its own takes the place of that, and of `urls`, which
  may be another's. Raises UserError, ServerError.
  """
  wiring.limits(config)  # refuses what cannot work before anything starts
  toolbox = wiring.build_toolbox(config, workdir)
  chat = wiring.build_chat(config, workdir, toolbox)
  c = config.server
  # Older configs have no such keys.
  kind, urls, count = c.get("kind", "kr"), tuple(c.get("urls", ())), c.get("count", 1)
  if count < 1:
    raise wiring.UserError(f"server.count={count} must be at least 1")
  if kind == "colocated":
    if count > 1 or urls:
      raise wiring.UserError("a colocated engine is one, and here: leave server.count 1 and "
                             "server.urls empty, or take another server.kind")
    if learner is not None:
      yield _colocated(config, toolbox, chat, version, learner)
      return
    kind = "kr"
  urls = urls if learner is not None else ()
  with contextlib.ExitStack() as stack:
    exports, served = None, policy_dir
    if kind.startswith("sglang"):
      from kr.model.exports import Exports  # jax comes along
      exports = stack.enter_context(
          contextlib.closing(Exports(workdir.path / "exports", workdir.start)))
      served = exports.add(policy_dir, version)
    servers = [] if urls else [
        ServerProcess(
            served, kind=kind, slots=c.slots, max_len=c.max_len, version=version,
            seed=config.seed + i,  # servers of one seed would sample the same
            log=workdir.server_log if i == 0 else workdir.path / f"server-{i}.log",
            start_timeout_s=c.start_timeout_s)
        for i in range(count)]
    for server in servers:
      stack.callback(server.stop)
      server.start()
    for server in servers:
      server.wait_healthy()
    policy = client_of(urls or [s.url for s in servers], alone=not urls and count == 1,
                       patient=exports is not None, wait_s=2 * c.start_timeout_s)
    yield Session(toolbox, chat, policy, servers, c.max_restarts, exports=exports,
                  first=(str(served), version) if urls else None)


def _colocated(config: ConfigDict, toolbox: Toolbox, chat: Chat, version: int, learner: Any
               ) -> Session:
  from kr.rl import colocated  # jax comes along: not for who only asks a server
  c = config.server
  try:
    policy, shared = colocated.beside(learner, c.get("mesh", ""), slots=c.slots, max_len=c.max_len,
                                      seed=config.seed, version=version)
  except ValueError as e:
    raise wiring.UserError(f"server.mesh: {e}") from e
  if shared and config.rollout.max_staleness:
    raise wiring.UserError(
        "on the learner's devices a colocated engine sleeps while the learner learns: set "
        "rollout.max_staleness=0, or give both meshes, learner.mesh and server.mesh, devices of "
        "their own")
  return Session(toolbox, chat, policy, [], c.max_restarts, learner=learner, alternate=shared)


def client_of(urls: Sequence[str], *, alone: bool, patient: bool, wait_s: float
              ) -> PolicyClient | Fleet:
  """The client of servers; it samples on-policy, at temperature 1.

  alone: of one that this process restarts. The client's retries outlast that: half a minute, or
  two if `patient`, for servers that load policies as Hugging Face directories (SGLang). Otherwise
  a dead one's requests go to another at once, and wait_s bounds the wait for one that is back.
  """
  if alone:
    return PolicyClient(urls[0], retries=8 if patient else 6)
  return Fleet([PolicyClient(url, retries=1) for url in urls], wait_s=wait_s)
