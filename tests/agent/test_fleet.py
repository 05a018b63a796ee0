"""Several servers as one policy: scripted clients for what is rare, real servers for the whole."""

import asyncio
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.request

import jax
import numpy as np
import pytest

from kr.agent.fleet import Fleet
from kr.agent.policy import ContextOverflow, OffPolicyError, PolicyClient, PolicyError, Sampled
from kr.model import checkpoint
from kr.model import hf
from kr.rl.server import ServerProcess, free_port

ROOT = pathlib.Path(__file__).parents[2]
START = ROOT / "starts" / "quickstart"


class Scripted:
  """A client whose server does as the test says; `log` has (method, argument) in order."""

  def __init__(self, number, log):
    self.url = f"http://server{number}"
    self.log = log
    self.alive = True
    self.version, self.paused = 0, False
    self.open = asyncio.Event()  # generation ends when it is set
    self.open.set()
    self.fails: Exception | None = None  # what generate raises
    self.refuses: Exception | None = None  # what update_weights raises
    self.off_policy = False

  def note(self, what, argument=None):
    self.log.append((self.url[-1], what, argument))
    if not self.alive:
      raise PolicyError(f"policy server {self.url} failed 1 times")

  async def generate(self, ids, *, max_new_tokens, stop_ids, rid, temperature=None):
    self.note("generate", (rid, tuple(ids)))
    try:
      await self.open.wait()
    except asyncio.CancelledError:
      self.log.append((self.url[-1], "cancelled", rid))
      raise
    if self.fails is not None:
      raise self.fails
    if not self.alive:
      raise PolicyError("connection lost")
    return Sampled([7, 2], [-1.0, -1.0], self.version, "stop")

  async def score(self, ids, rid=None):
    self.note("score")
    return [-0.5] * len(ids)

  async def info(self):
    self.note("info")
    return {"weight_version": str(self.version) if self.version else "default"}

  async def check_on_policy(self, probe=(1,), tolerance=None):
    self.note("check", probe)
    if self.off_policy:
      raise OffPolicyError("top_p=0.9")
    return {"logprob_gap": 0.001 * int(self.url[-1]), "reports_version": True}

  async def update_weights(self, path, version):
    self.note("update", (str(path), version))
    if self.refuses is not None:
      raise self.refuses
    self.version = version

  async def pause(self, mode="retract"):
    self.note("pause")
    self.paused = True

  async def resume(self):
    self.note("resume")
    self.paused = False

  async def abort(self, rid=None):
    self.note("abort", rid)

  async def flush(self):
    self.note("flush")

  async def healthy(self):
    return self.alive

  async def aclose(self):
    self.log.append((self.url[-1], "aclose", None))


def fleet(test, count=2, **options):
  """Runs `test(fleet, clients, log)` on scripted servers."""
  async def main():
    log = []
    clients = [Scripted(i, log) for i in range(count)]
    one = Fleet(clients, **{"check_s": 0.01, "wait_s": 20.0, **options})
    try:
      return await test(one, clients, log)
    finally:
      await one.aclose()
  return asyncio.run(asyncio.wait_for(main(), 60))


def sample(one, rid, ids=(1, 2)):
  return one.generate(list(ids), max_new_tokens=9, stop_ids=[2], rid=rid)


def served(log, what="generate"):
  """(server, trajectory) of each request."""
  return [(server, argument[0].split(".")[0]) for server, name, argument in log if name == what]


async def until(condition):
  while not condition():
    await asyncio.sleep(0.002)


# -------------------------------------------------------------------- where requests go


def test_new_trajectories_go_to_the_server_with_the_fewest_requests_then_tokens():
  async def test(one, clients, log):
    for client in clients:
      client.open.clear()
    jobs = []
    for name, tokens in (("a", 9), ("b", 3), ("c", 1), ("d", 1)):
      jobs.append(asyncio.create_task(sample(one, f"{name}.0.0.", [1] * tokens)))
      await until(lambda: len(served(log)) == len(jobs))
    for client in clients:
      client.open.set()
    await asyncio.gather(*jobs)
    return served(log)
  assert fleet(test) == [("0", "a"), ("1", "b"), ("1", "c"), ("0", "d")]


def test_a_trajectory_stays_on_the_server_that_holds_its_prefix():
  async def test(one, clients, log):
    for client in clients:
      client.open.clear()
    jobs = [asyncio.create_task(sample(one, f"{name}.0.0.")) for name in ("a", "b.dotted")]
    await until(lambda: len(served(log)) == 2)
    for client in clients:
      client.open.set()
    await asyncio.gather(*jobs)
    for turn in (1, 2):  # one at a time: for load alone all would go to server 0
      await sample(one, f"b.dotted.{turn}.0.")
      await sample(one, f"a.{turn}.1.")
    return sorted(served(log))
  assert fleet(test) == [("0", "a")] * 3 + [("1", "b")] * 3


def test_a_trajectory_moves_when_its_server_is_far_busier_than_another():
  async def test(one, clients, log):
    clients[1].alive = False
    await sample(one, "a.0.0.")  # all begin on server 0
    clients[0].open.clear()
    jobs = [asyncio.create_task(sample(one, f"a{i}.0.0.")) for i in range(12)]
    await until(lambda: len(served(log)) == 13)
    clients[1].alive = True
    await until(lambda: ("1", "resume", None) in log)
    await sample(one, "a.1.0.")
    clients[0].open.set()
    await asyncio.gather(*jobs)
    return served(log)[13:]
  assert fleet(test) == [("1", "a")]


# -------------------------------------------------------------------- failures


def test_a_request_on_a_server_that_dies_continues_elsewhere_from_its_tokens():
  async def test(one, clients, log):
    clients[0].open.clear()
    job = asyncio.create_task(sample(one, "a.3.0.", [4, 5, 6]))
    await until(lambda: served(log))
    clients[0].alive = False
    clients[0].open.set()  # the connection breaks
    return await job, [e for e in log if e[1] == "generate"]
  sampled, requests = fleet(test)
  assert sampled.ids == [7, 2]
  assert requests == [("0", "generate", ("a.3.0.", (4, 5, 6))),
                      ("1", "generate", ("a.3.0.", (4, 5, 6)))]


def test_a_server_that_hangs_is_given_up_and_its_request_cancelled():
  async def test(one, clients, log):
    clients[0].open.clear()
    job = asyncio.create_task(sample(one, "a.0.0."))
    await until(lambda: served(log))
    clients[0].alive = False  # no answer to /health, and none to the request
    sampled = await job
    await until(lambda: ("0", "cancelled", "a.0.0.") in log)
    return sampled, served(log)
  sampled, requests = fleet(test)
  assert sampled.ids == [7, 2] and requests == [("0", "a"), ("1", "a")]


def test_a_server_that_lives_and_fails_leaves_the_request_to_another():
  async def test(one, clients, log):
    clients[0].fails = PolicyError("HTTP 500: out of memory")
    sampled = await sample(one, "a.0.0.")
    clients[1].fails = PolicyError("HTTP 500: no space")
    with pytest.raises(PolicyError, match="out of memory|no space"):
      await sample(one, "b.0.0.")
    return sampled
  assert fleet(test).ids == [7, 2]


def test_an_over_long_prompt_is_refused_once():
  async def test(one, clients, log):
    for client in clients:
      client.fails = ContextOverflow("too long")
    with pytest.raises(ContextOverflow):
      await sample(one, "a.0.0.")
    return len(served(log))
  assert fleet(test) == 1


def test_requests_wait_while_no_server_is_left():
  async def test(one, clients, log):
    await sample(one, "a.0.0.")
    for client in clients:
      client.alive = False
    job = asyncio.create_task(sample(one, "a.1.0."))
    await asyncio.sleep(0.05)
    assert not job.done() and not await one.healthy()
    clients[1].alive = True
    return await job
  assert fleet(test).ids == [7, 2]


def test_no_server_for_too_long_is_an_error_that_names_them():
  async def test(one, clients, log):
    for client in clients:
      client.alive = False
    with pytest.raises(PolicyError, match="http://server0, http://server1"):
      await sample(one, "a.0.0.")
    return True
  assert fleet(test, wait_s=0.05)


def test_cancelling_cancels_the_request():
  async def test(one, clients, log):
    clients[0].open.clear()
    job = asyncio.create_task(sample(one, "a.0.0."))
    await until(lambda: served(log))
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
      await job
    return log
  assert ("0", "cancelled", "a.0.0.") in fleet(test)


# -------------------------------------------------------------------- policies


def test_no_server_samples_on_before_all_have_the_new_policy():
  async def test(one, clients, log):
    await sample(one, "a.0.0.")
    log.clear()
    await one.update_weights("/p1", 1)
    return [what for _, what, _ in log], [(c.version, c.paused) for c in clients]
  order, state = fleet(test, count=3)
  assert order == ["pause"] * 3 + ["update"] * 3 + ["resume"] * 3
  assert state == [(1, False)] * 3


def test_publishing_leaves_a_pause_of_the_callers_alone():
  async def test(one, clients, log):
    await one.pause()
    await one.update_weights("/p1", 1)
    return [(c.version, c.paused) for c in clients]
  assert fleet(test) == [(1, True)] * 2


def test_a_refused_publication_names_the_server_and_keeps_it_from_serving():
  async def test(one, clients, log):
    clients[1].refuses = PolicyError("no space left")
    with pytest.raises(PolicyError, match=r"version 1 was not published to http://server1 \(no sp"):
      await one.update_weights("/p1", 1)
    versions = [(await sample(one, f"{i}.0.0.")).version for i in range(4)]
    clients[1].refuses = None
    await until(lambda: clients[1].version == 1 and not clients[1].paused)
    return versions
  assert fleet(test) == [1] * 4


def test_what_all_servers_refuse_changes_nothing():
  async def test(one, clients, log):
    await one.update_weights("/p1", 1)
    for client in clients:
      client.refuses = PolicyError("no such directory")
    with pytest.raises(PolicyError, match="server0 .*; http://server1 "):
      await one.update_weights("/p2", 2)
    return (await sample(one, "a.0.0.")).version, [c.paused for c in clients]
  assert fleet(test) == (1, [False, False])


def test_a_server_that_comes_back_gets_the_current_policy_before_it_serves():
  async def test(one, clients, log):
    await one.check_on_policy([3])
    await one.update_weights("/p1", 1)
    clients[0].alive = False
    await until(lambda: not one._servers[0].up)
    await one.update_weights("/p2", 2)  # one is dead: not an error
    one.moved("/p2-final")
    clients[0].version, clients[0].alive = 0, True  # restarted from what it once began with
    log.clear()
    await until(lambda: one._servers[0].up)
    sampled = [await sample(one, f"{i}.0.0.") for i in range(3)]
    return [(what, a) for server, what, a in log if server == "0"], sampled
  log, sampled = fleet(test)
  assert log[:4] == [("pause", None), ("update", ("/p2-final", 2)), ("resume", None),
                     ("check", [3])]
  assert [s.version for s in sampled] == [2, 2, 2] and ("generate", ("0.0.0.", (1, 2))) in log


def test_a_server_that_comes_back_during_a_pause_is_paused():
  async def test(one, clients, log):
    await one.update_weights("/p1", 1)
    clients[0].alive = False
    await until(lambda: not one._servers[0].up)
    await one.pause()
    clients[0].alive, clients[0].paused = True, False
    await until(lambda: one._servers[0].up)
    return clients[0].paused, clients[0].version
  assert fleet(test) == (True, 1)


def test_a_restart_that_nobody_saw_does_not_bring_an_older_policy_back():
  """The client's own retry reached a server that had been restarted with older weights."""
  async def test(one, clients, log):
    await one.update_weights("/p3", 3)
    clients[0].version = 0
    sampled = await sample(one, "a.0.0.")
    await until(lambda: clients[0].version == 3)
    return sampled, served(log)
  sampled, requests = fleet(test)
  assert sampled.version == 3 and requests == [("0", "a"), ("1", "a")]


def test_a_server_whose_version_nobody_can_mend_stays_out():
  async def test(one, clients, log):
    for client in clients:
      client.version = 4
    await sample(one, "a.0.0.")
    clients[0].alive = False
    await until(lambda: not one._servers[0].up)
    clients[0].version, clients[0].alive = 2, True
    await until(lambda: one._servers[0].stays_out)
    return one._servers[0].up, one._servers[0].stays_out
  up, why = fleet(test)
  assert not up and "holds version 2 of the policy, not 4" in why


def test_servers_of_different_versions_are_refused_before_the_first_request():
  async def test(one, clients, log):
    clients[1].version = 3
    with pytest.raises(PolicyError, match="http://server0: 0, http://server1: 3"):
      await sample(one, "a.0.0.")
    await one.update_weights("/p4", 4)
    return served(log), (await sample(one, "a.0.0.")).version
  assert fleet(test) == ([], 4)


def test_the_on_policy_check_covers_every_server_and_names_the_one_that_fails():
  async def test(one, clients, log):
    found = await one.check_on_policy()
    clients[1].off_policy = True
    with pytest.raises(OffPolicyError, match="http://server1: top_p=0.9"):
      await one.check_on_policy()
    return found
  assert fleet(test) == {"logprob_gap": 0.001, "reports_version": True}


def test_aborting_flushing_scoring_and_closing_reach_the_servers():
  async def test(one, clients, log):
    assert await one.score([1, 2]) == [-0.5, -0.5]
    assert set((await one.info())["servers"]) == {"http://server0", "http://server1"}
    await one.abort("a.0.")
    await one.flush()
    await one.aclose()
    return log
  log = fleet(test)
  assert [e for e in log if e[1] == "abort"] == [("0", "abort", "a.0."), ("1", "abort", "a.0.")]
  assert {e[0] for e in log if e[1] == "flush"} == {e[0] for e in log if e[1] == "aclose"} == {
    "0", "1"}
  with pytest.raises(ValueError, match="at least one server"):
    Fleet([])


# -------------------------------------------------------------------- behind a router


def routed(test):
  """`fleet`, with a router before the servers; its client is number 9."""
  async def main():
    log = []
    clients = [Scripted(i, log) for i in range(2)]
    router = Scripted(9, log)
    one = Fleet(clients, router=router, check_s=0.01)
    try:
      return await test(one, clients, router, log)
    finally:
      await one.aclose()
  return asyncio.run(asyncio.wait_for(main(), 60))


def test_a_router_gets_the_requests_and_every_server_the_policies():
  async def test(one, clients, router, log):
    await one.update_weights("/p1", 1)
    router.version = 1
    await sample(one, "a.0.0.")
    await one.aclose()
    return log
  log = routed(test)
  assert [server for server, what, _ in log if what == "generate"] == ["9"]
  assert [server for server, what, _ in log if what == "update"] == ["0", "1"]
  assert {server for server, what, _ in log if what == "aclose"} == {"0", "1", "9"}


def test_an_older_turn_through_a_router_is_sampled_again_and_the_server_mended():
  async def test(one, clients, router, log):
    await one.update_weights("/p1", 1)
    clients[1].version = 0  # restarted, and the router asked it
    job = asyncio.create_task(sample(one, "a.0.0."))
    await until(lambda: clients[1].version == 1)
    router.version = 1
    return await job
  assert routed(test).version == 1


def test_cancelling_a_routed_request_aborts_it_on_the_servers():
  async def test(one, clients, router, log):
    router.open.clear()
    job = asyncio.create_task(sample(one, "a.0.0."))
    await until(lambda: served(log))
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
      await job
    return log
  log = routed(test)
  assert ("0", "abort", "a.0.0.") in log and ("1", "abort", "a.0.0.") in log


# -------------------------------------------------------------------- real servers


@pytest.fixture(name="policies", scope="module")
def fixture_policies(tmp_path_factory):
  """Policy 0, the shipped one, and policy 1, which differs from it."""
  params, cfg = hf.load(START)
  rng = np.random.default_rng(0)
  moved = jax.tree.map(
    lambda a: np.asarray(a + 0.02 * rng.normal(size=a.shape), np.float32), params)
  path = tmp_path_factory.mktemp("policies") / "1"
  checkpoint.save_policy(path, moved, cfg)
  return START, path


TURNS, TRAJECTORIES = 6, 24


async def roll_out(one, number, done):
  """A trajectory as the loop makes it: the tokens so far, a sampled turn, an observation."""
  ids, turns = [5 + number, 17, 23, 40 + number], []
  for turn in range(TURNS):
    for attempt in range(20):
      sampled = await one.generate(list(ids), max_new_tokens=24, stop_ids=[], temperature=None,
                                   rid=f"t{number}.{turn}.{attempt}.")
      if sampled.finish != "abort":
        break
    turns.append((len(ids), sampled))
    ids += [*sampled.ids, 60 + turn]
    done.append((number, turn))
  return ids, turns


@pytest.mark.slow
def test_a_server_killed_in_mid_rollout_loses_nothing_and_comes_back_with_the_current_policy(
    policies, tmp_path):
  """Two servers; one dies by kill -9, a policy is published meanwhile, and it is restarted."""
  first, second = policies
  servers = [ServerProcess(first, slots=8, max_len=256, seed=i, version=0,
                           log=tmp_path / f"{i}.log") for i in range(2)]

  async def main():
    one = Fleet([PolicyClient(s.url, retries=1) for s in servers], check_s=0.2)
    done = []
    try:
      await one.check_on_policy()
      rollouts = [asyncio.create_task(roll_out(one, i, done)) for i in range(TRAJECTORIES)]
      await until(lambda: len(done) >= TRAJECTORIES)
      assert {s.requests > 0 for s in one._servers} == {True}  # both are busy
      await asyncio.to_thread(servers[0]._process.kill)
      await until(lambda: len(done) >= 2 * TRAJECTORIES)
      await one.update_weights(second, 1)
      await asyncio.to_thread(servers[0].restart)  # with policy 0
      assert (servers[0].version, servers[0].restarts) == (0, 1)
      finished = await asyncio.gather(*rollouts)
      await until(lambda: one._servers[0].up)
      again = await asyncio.gather(*(roll_out(one, i, done) for i in range(4)))
      versions = {url: i["weight_version"] for url, i in (await one.info())["servers"].items()}
      scores = [await one.score(ids) for ids, _ in [*finished, *again]]
      return finished, again, versions, scores
    finally:
      await one.aclose()

  with servers[0], servers[1]:
    finished, again, versions, scores = asyncio.run(asyncio.wait_for(main(), 400))
  assert versions == {s: "1" for s in versions} and len(versions) == 2
  assert len(finished) == TRAJECTORIES and all(len(turns) == TURNS for _, turns in finished)
  found = [[sampled.version for _, sampled in turns] for _, turns in finished]
  assert all(v == sorted(v) for v in found)  # a new policy is never followed by the old one
  assert {v for row in found for v in row} == {0, 1}
  assert {s.version for _, turns in again for _, s in turns} == {1}
  gaps = {0: [], 1: []}  # to the scores of policy 1
  for (ids, turns), scored in zip([*finished, *again], scores, strict=True):
    for start, sampled in turns:
      assert sampled.ids == ids[start:start + len(sampled.ids)]
      gaps[sampled.version] += list(np.abs(
        np.subtract(scored[start:start + len(sampled.ids)], sampled.logprobs)))
  # What is called version 1 was sampled by policy 1, wherever; and the two can be told apart.
  assert max(gaps[1]) < 1e-3 < 10 * np.mean(gaps[0])


def router_python():
  """An interpreter that has sglang-router: this one, or that of SGLang's environment."""
  for python in (sys.executable, ROOT / ".venv-sglang" / "bin" / "python"):
    if pathlib.Path(python).exists() and not subprocess.run(
        [python, "-c", "import sglang_router"], capture_output=True).returncode:
      return python
  return None


@contextlib.contextmanager
def sglang_router(servers, log):
  """Its address, once it knows the servers.

  Cache-aware by token ids; its defaults would send all prompts with a common beginning to one
  server until that has 64 requests more than another.
  """
  port = free_port()
  with open(log, "wb") as out:
    process = subprocess.Popen(
      [router_python(), "-m", "sglang_router.launch_router", "--host=127.0.0.1", f"--port={port}",
       f"--prometheus-port={free_port()}", "--policy=cache_aware", "--cache-threshold=0.8",
       "--balance-abs-threshold=4", "--health-check-interval-secs=1",
       "--health-failure-threshold=2", "--health-success-threshold=1",
       "--worker-urls", *(s.url for s in servers)], stdout=out, stderr=out,
      # SGLang's environment on a CPU imports with what stands in for CUDA's libraries.
      env={**os.environ, "PYTHONPATH": str(ROOT / "launch" / "sglang" / "cpu")})
  try:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
      with contextlib.suppress(OSError):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/workers", timeout=5) as answer:
          if sum(w["is_healthy"] for w in json.load(answer)["workers"]) == len(servers):
            break
      time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
  finally:
    process.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.skipif(router_python() is None, reason="sglang-router is not installed")
def test_sglang_router_before_two_servers_one_of_which_dies(policies, tmp_path):
  first, second = policies
  servers = [ServerProcess(first, slots=8, max_len=256, seed=i, version=0,
                           log=tmp_path / f"{i}.log") for i in range(2)]

  async def main(url):
    one = Fleet([PolicyClient(s.url, retries=1) for s in servers], router=PolicyClient(url),
                check_s=0.2)
    done = []
    try:
      await one.check_on_policy()
      await asyncio.gather(*(roll_out(one, i, done) for i in range(6)))
      counts = [i["counts"] for i in (await one.info())["servers"].values()]
      await one.update_weights(second, 1)
      rollouts = [asyncio.create_task(roll_out(one, i, done)) for i in range(8)]
      await until(lambda: len(done) >= 6 * TURNS + 8)
      await asyncio.to_thread(servers[0]._process.kill)
      return await asyncio.gather(*rollouts), counts
    finally:
      await one.aclose()

  with servers[0], servers[1], sglang_router(servers, tmp_path / "router.log") as url:
    finished, counts = asyncio.run(asyncio.wait_for(main(url), 300))
  assert all(len(turns) == TURNS for _, turns in finished)
  assert {sampled.version for _, turns in finished for _, sampled in turns} == {1}
  assert all(c["requests"] > 8 for c in counts)  # both served, not only the on-policy check
  cached, computed = (sum(c[key] for c in counts) for key in ("cached_tokens", "prefill_tokens"))
  assert cached > computed  # turns went to the server that holds their prefix
