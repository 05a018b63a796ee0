"""A run's inference servers: restarted, published to, several of them, or none but an engine."""

import asyncio
import contextlib
import json
import os
import pathlib
import subprocess
import sys

import ml_collections
import pytest

from kr import serving
from kr import wiring
from kr.agent.fleet import Fleet
from kr.agent.policy import PolicyClient
from kr.rl.server import ServerError

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Server:
  """Stands in for ServerProcess: dies when told to."""
  url = "http://127.0.0.1:9"

  def __init__(self):
    self.up, self.restarts, self.model, self.version = True, 0, "old", 0

  def alive(self):
    return self.up

  def restart(self):
    self.restarts += 1
    self.up = True


class NoTools:
  """A toolbox that notes that it was closed."""
  closed = False

  async def aclose(self):
    self.closed = True


def session_of(server, max_restarts, monkeypatch):
  monkeypatch.setattr(serving, "WATCH_S", 0.001)
  return serving.Session(NoTools(), None, PolicyClient(server.url), [server], max_restarts)


def test_a_server_that_dies_is_restarted_and_the_work_goes_on(monkeypatch):
  server = Server()
  session = session_of(server, 1, monkeypatch)

  async def work(policy):
    assert policy is session.policy
    server.up = False
    while not server.restarts:
      await asyncio.sleep(0.001)
    return "done"
  assert session.run(work) == "done"
  assert server.up and session.toolbox.closed


def test_a_server_that_keeps_dying_stops_the_work_with_what_to_do(monkeypatch):
  server, stopped = Server(), []
  session = session_of(server, 2, monkeypatch)

  async def work(policy):
    try:
      while True:
        server.up = False
        await asyncio.sleep(0.001)
    finally:
      stopped.append(True)
  with pytest.raises(ServerError, match="died 3 times.*same command goes on"):
    session.run(work)
  assert server.restarts == 2 and stopped == [True] and session.toolbox.closed


def test_an_error_of_the_work_passes_and_everything_is_closed(monkeypatch):
  session = session_of(Server(), 1, monkeypatch)

  async def work(policy):
    raise KeyError("a bug")
  with pytest.raises(KeyError):
    session.run(work)
  assert session.toolbox.closed


def test_a_published_policy_is_what_a_restart_would_serve(monkeypatch):
  server, sent = Server(), []
  session = session_of(server, 1, monkeypatch)

  async def update_weights(path, version):
    sent.append((path, version, server.model, server.version))
  monkeypatch.setattr(session.policy, "update_weights", update_weights)
  asyncio.run(session.publish(pathlib.Path("/w/checkpoints/8"), 8))
  assert sent == [("/w/checkpoints/8", 8, "/w/checkpoints/8", 8)]


class NoExports:
  """Notes what was exported and kept."""

  def __init__(self):
    self.calls = []

  def add(self, policy, version):
    self.calls.append(("add", str(policy), version))
    return f"/exports/{version}"

  def keep(self, version):
    self.calls.append(("keep", version))


@pytest.mark.parametrize("works", [True, False])
def test_a_server_of_hugging_face_directories_gets_an_export_which_stays_while_it_is_served(
    works, monkeypatch):
  server, exports = Server(), NoExports()
  session = serving.Session(NoTools(), None, PolicyClient(server.url), [server], 1,
                            exports=exports)

  async def update_weights(path, version):
    exports.calls.append(("update", path, version, server.model, server.version))
    if not works:
      raise ServerError("no")
  monkeypatch.setattr(session.policy, "update_weights", update_weights)
  with contextlib.nullcontext() if works else pytest.raises(ServerError):
    asyncio.run(session.publish(pathlib.Path("/w/8.policy"), 8))
  session.moved("/w/8")
  assert server.model == "/exports/8"
  assert exports.calls == [("add", "/w/8.policy", 8), ("update", "/exports/8", 8, "/exports/8", 8),
                           ("keep", 8)][:2 + works]


def test_all_servers_are_told_what_to_serve_before_any_is_asked_to(monkeypatch):
  servers, told = [Server(), Server()], []
  policy = serving.client_of([s.url for s in servers], alone=False, patient=False, wait_s=1)
  assert isinstance(policy, Fleet)
  session = serving.Session(NoTools(), None, policy, servers, 1)

  async def update_weights(path, version):
    told.extend((s.model, s.version) for s in servers)
  monkeypatch.setattr(policy, "update_weights", update_weights)
  asyncio.run(session.publish("/w/8.policy", 8))
  assert told == [("/w/8.policy", 8)] * 2
  session.moved("/w/8")
  assert [s.model for s in servers] == ["/w/8"] * 2


@pytest.mark.parametrize("change, text", [
    ({"count": 0}, "server.count=0 must be at least 1"),
    ({"kind": "colocated", "count": 2}, "a colocated engine is one"),
    ({"kind": "colocated", "urls": ("http://a:1",)}, "a colocated engine is one")])
def test_servers_that_cannot_be_are_refused(change, text, monkeypatch):
  for name in ("limits", "build_toolbox", "build_chat"):
    monkeypatch.setattr(wiring, name, lambda *args: None)
  config = ml_collections.ConfigDict({"server": {"kind": "kr", "count": 1, "urls": (), **change}})
  with pytest.raises(wiring.UserError, match=text):
    with serving.session(config, None, None):
      pass


def test_servers_of_others_get_the_runs_policy_before_anything_is_sampled(monkeypatch):
  policy, told = serving.client_of(["http://a:1"], alone=False, patient=False, wait_s=1), []
  session = serving.Session(NoTools(), None, policy, [], 1, first=("/w/checkpoints/3", 3))

  async def update_weights(path, version):
    told.append((path, version))
  monkeypatch.setattr(policy, "update_weights", update_weights)

  async def work(client):
    assert isinstance(client, Fleet) and told == [("/w/checkpoints/3", 3)]
    return "done"
  assert session.run(work) == "done"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    ["--config.server.kind=colocated"], ["--config.server.count=2"],
    ["--config.server.kind=colocated", "--config.learner.mesh=fsdp=4",
     "--config.server.mesh=tensor=2", "--config.rollout.max_staleness=1",
     "--config.rl.off_policy=tis"]])
def test_a_run_trains_whatever_serves_it(flags, tmp_path):
  command = [sys.executable, "-m", "kr.train", "--config=configs/quickstart.py:tiny",
             f"--workdir={tmp_path}", "--config.rl.steps=2", "--config.eval.tasks=4",
             "--config.eval.samples=1", *flags]
  virtual = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"} if len(flags) > 2 else {}
  env = {**os.environ, **virtual}
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=env)
  assert done.returncode == 0, done.stderr[-3000:]
  rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  assert [row["step"] for row in rows] == [1, 2]
  assert all(row["logprob_gap"] < 1e-5 and row["publish_s"] > 0 for row in rows)
