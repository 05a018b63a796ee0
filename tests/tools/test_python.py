"""The python tool: one worker a session, its end told, many sessions at once."""

import asyncio
import json

import pytest

from kr.tools import python, sandbox
from kr.tools.base import Toolbox
from kr.types import ToolCall


@pytest.fixture(scope="module", autouse=True)
def isolation():
  try:
    sandbox.check()
  except sandbox.SandboxUnavailable as e:
    pytest.skip(f"this host cannot isolate code: {e}")


def drive(scenario, **options):
  """Runs `scenario(ask, tool)` where `ask(code, session)` gives the result's (ok, text)."""
  async def main():
    tool = python.Python(**{"wall_s": 30.0, **options})
    toolbox = Toolbox([tool], timeout_s=60.0)
    async def ask(code, session="s"):
      result = await toolbox.call(session, ToolCall("python", {"code": code}))
      return result.ok, result.text
    try:
      return await scenario(ask, tool)
    finally:
      await tool.aclose()
  return asyncio.run(main())


def test_each_session_has_its_own_variables():
  async def scenario(ask, tool):
    assert await ask("x = 1") == (True, "(no output)")
    assert await ask("x", "other") == (False, "NameError: name 'x' is not defined (line 1)")
    assert await ask("x") == (True, "1")
    await tool.close("s")
    assert await ask("x") == (False, "NameError: name 'x' is not defined (line 1)")
  drive(scenario)


def test_a_timeout_and_a_death_are_told_and_the_next_call_starts_afresh():
  async def scenario(ask, tool):
    await ask("x = 1")
    assert await ask("while True: pass") == (False, "timed out after 1 s; variables are lost")
    assert await ask("'x' in globals()") == (True, "False")
    assert await ask("import os\nos._exit(0)") == (
        False, "the worker process died (exit status 0); variables are lost")
    assert await ask("2") == (True, "2")
  drive(scenario, wall_s=1.0)


def test_twenty_sessions_run_at_once():
  async def scenario(ask, tool):
    async def session(i):
      await ask(f"x = {i}", str(i))
      await ask("import time\ntime.sleep(0.05)", str(i))
      return await ask("x * 2", str(i))
    assert await asyncio.gather(*map(session, range(20))) == [(True, str(2 * i)) for i in range(20)]
  drive(scenario)


def test_the_calls_of_one_turn_run_in_order():
  async def scenario(ask, tool):
    await ask("log = []")
    await asyncio.gather(*(ask(f"log.append({i})") for i in range(5)))
    assert await ask("log") == (True, "[0, 1, 2, 3, 4]")
  drive(scenario)


def test_live_workers_are_capped_and_an_ended_session_is_told():
  async def scenario(ask, tool):
    for name in ("a", "b", "c"):
      await ask(f"x = '{name}'", name)
    assert await ask("x", "c") == (True, "'c'")
    assert await ask("x", "b") == (True, "'b'")
    assert await ask("'x' in globals()", "a") == (True, "(earlier variables are lost)\nFalse")
    assert await ask("1", "a") == (True, "1")
    assert await ask("1", "c") == (True, "(earlier variables are lost)\n1")
  drive(scenario, max_workers=2)


def test_after_a_move_to_another_process_the_loss_is_told_once():
  async def first(ask, tool):
    assert tool.snapshot("s") is None
    await ask("x = 1")
    state = json.loads(json.dumps(tool.snapshot("s")))
    tool.restore("s", state)
    assert await ask("x") == (True, "1")   # the same process: nothing is lost
    return state

  async def second(ask, tool):
    tool.restore("s", state)
    assert tool.snapshot("s") == state     # moved again before it was told
    assert await ask("x = 5\nx") == (True, "(earlier variables are lost)\n5")
    assert await ask("x") == (True, "5")

  state = drive(first)
  drive(second)


def test_a_cancelled_call_ends_its_worker_and_the_loss_is_told():
  async def scenario(ask, tool):
    await ask("x = 1")
    worker = tool._sessions["s"].worker
    task = asyncio.ensure_future(ask("while True: pass"))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    with pytest.raises(sandbox.WorkerLost):
      await asyncio.to_thread(worker.run, "1", 30.0)
    assert await ask("1") == (True, "(earlier variables are lost)\n1")
  drive(scenario)


def test_closing_a_session_in_mid_call_ends_the_call():
  async def scenario(ask, tool):
    task = asyncio.ensure_future(ask("while True: pass"))
    await asyncio.sleep(0.2)
    await tool.close("s")
    ok, text = await task
    assert not ok and text.endswith("; variables are lost")
  drive(scenario)


def test_a_worker_outlives_the_event_loop_that_made_it():
  tool = python.Python(wall_s=30.0)
  async def ask(code):
    result = await tool.call("s", {"code": code})
    return result.text
  try:
    asyncio.run(ask("x = 7"))
    assert asyncio.run(ask("x")) == "7"
  finally:
    asyncio.run(tool.aclose())


def test_results_are_bounded():
  async def scenario(ask, tool):
    ok, text = await ask("print('x' * 1000)\n'y' * 1000")
    assert ok and len(text) <= 300 and text.startswith("x") and text.endswith("y'")
  drive(scenario, max_chars=300)
