"""The inference engine inside the learner's process, behind the client's interface.

A second process cannot open a TPU host's chips, and a checkpoint on disk is a detour between two
parts of one machine. So `kr.serve`'s engine also runs here, on the learner's devices or on
others, and new weights reach it from device to device. Two ways of sharing:

- The phases alternate (strictly on-policy): `sleep` gives the memory of weights and KV cache to
  the update, and the next publication takes it back; the learner's optimizer meanwhile waits in
  the host's memory (`Learner.park`). What is needed is the larger of the two, not the sum.
- Disjoint devices: both run at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from kr.agent import policy
from kr.model import request as protocol
from kr.model import sharding
from kr.model.engine import Engine, EngineError


def beside(learner: Any, mesh: str, *, slots: int, max_len: int, seed: int, version: int
           ) -> tuple["ColocatedClient", bool]:
  """(the client of an engine that samples the learner's policy, whether the two share devices).

  mesh: such as "tensor=4", over the last devices of this process; "": one device. The others are
  as `kr.model.engine.Engine` takes them. On shared devices the learner is parked first. Raises
  ValueError for a mesh that cannot be.
  """
  where = sharding.make_mesh(mesh, sharding.enough(mesh)[1]) if mesh else None
  shared = bool(sharding.devices(where) & sharding.devices(learner.mesh))
  if shared:
    learner.park()
  return ColocatedClient(Engine(
      learner.policy, learner.cfg, slots=slots, max_len=max_len, seed=seed, version=str(version),
      mesh=where)), shared


class ColocatedClient(policy.PolicyClient):
  """A `PolicyClient` whose server is an engine of this process. It ends the engine on `aclose`.

  What the client sends and reads is what it would over HTTP; only the way is shorter. Weights
  come as the learner's own tree instead of a directory.
  """

  def __init__(self, engine: Engine, sampling: Mapping[str, Any] | None = None):
    super().__init__("the colocated engine", sampling, retries=0)
    self._engine = engine

  async def update_weights(self, params: Any, version: int) -> None:
    """Publishes the learner's policy, a tree of arrays wherever they lie, as `version`.

    As over HTTP, running requests are retracted and go on; after `sleep` the engine wakes up.
    Raises PolicyError when the weights do not fit or are not finite: then the old ones stay, or,
    after `sleep`, none.
    """
    was_paused = self._paused
    if not was_paused:
      await self.pause()
    try:
      update = await asyncio.to_thread(self._engine.update, params, str(version))
      await asyncio.wrap_future(update)
    except (ValueError, EngineError) as e:
      raise policy.PolicyError(f"the engine did not take version {version}: {e}") from e
    finally:
      if not was_paused:
        await self.resume()
    self._version = version

  async def sleep(self) -> None:
    """Gives up the engine's memory, weights and cache, until the next `update_weights`.

    Requests that come meanwhile wait for it, and those that run are computed again.
    """
    await self.pause()
    await self._did(self._engine.release())
    self._paused = False  # so that the next publication also resumes

  async def healthy(self) -> bool:
    """Whether the engine's thread runs."""
    return self._engine.alive

  async def aclose(self) -> None:
    """Ends the engine: what runs is aborted."""
    await asyncio.to_thread(self._engine.stop)

  async def _once(self, method: str, path: str, body: dict[str, Any] | None,
                  missing: dict[str, Any] | None) -> dict[str, Any]:
    del method
    engine, body = self._engine, body or {}
    try:
      if path == "/generate":
        return await self._generate_here(body)
      if path == "/pause_generation":
        await self._did(engine.pause(body["mode"]))
      elif path == "/continue_generation":
        await self._did(engine.resume())
      elif path == "/abort_request":
        await self._did(engine.abort(None if body.get("abort_all") else body["rid"]))
      elif path == "/flush_cache":
        if not await self._did(engine.flush()):
          raise policy.PolicyError("the cache was not flushed: requests are running")
      elif path in ("/server_info", "/get_model_info"):
        return {"server": "colocated", "dtype": "float32", "vocab_size": engine.cfg.vocab,
                "context_length": engine.max_len, "weight_version": engine.version}
      elif missing is not None:
        return missing
      else:
        raise policy.PolicyError(f"a colocated engine has no {path}")
      return {}
    except EngineError as e:
      raise policy.PolicyError(str(e)) from e

  async def _generate_here(self, body: dict[str, Any]) -> dict[str, Any]:
    try:
      (request,), _ = protocol.parse(body, frozenset())
      future = self._engine.submit(request)
    except ValueError as e:
      error = policy.ContextOverflow if "context length" in str(e) else policy.PolicyError
      raise error(str(e)) from e
    return protocol.answer(request, await asyncio.shield(asyncio.wrap_future(future)))

  @staticmethod
  async def _did(future: Any) -> Any:
    return await asyncio.wrap_future(future)
