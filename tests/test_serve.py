"""One real server process over HTTP: the right answer each time, and it keeps serving."""

import asyncio
import json
import pathlib
import signal
import socket
import subprocess
import sys

import aiohttp
import numpy as np
import pytest

from kr.agent.policy import ContextOverflow, PolicyClient
from kr.model import checkpoint
from kr.model import transformer
from kr.model.config import ModelConfig
from kr.rl.server import ServerProcess, free_port

CFG = ModelConfig(vocab=61, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=32,
                  max_len=512)
ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(name="models", scope="module")
def fixture_models(tmp_path_factory):
  """Policy checkpoints: two that fit each other, and a wider one that does not."""
  root = tmp_path_factory.mktemp("models")
  for name, cfg, seed in (("a", CFG, 3), ("b", CFG, 4),
                          ("wide", ModelConfig(**{**CFG.__dict__, "mlp": 48}), 3)):
    checkpoint.save_policy(root / name, transformer.init(cfg, seed), cfg)
  return root


@pytest.fixture(name="server", scope="module")
def fixture_server(models, tmp_path_factory):
  log = tmp_path_factory.mktemp("log") / "server.log"
  with ServerProcess(models / "a", max_len=256, log=log,
                     compile_cache=tmp_path_factory.mktemp("cache")) as server:
    yield server
    assert server.alive(), log.read_text()


def talk(server, work):
  """The value of work(post), where post(path, body) gives (status, JSON or text)."""
  async def whole():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
      async def post(path, body=None, data=None, method="POST"):
        async with session.request(method, server.url + path, json=body, data=data) as response:
          text = await response.text()
          try:
            return response.status, json.loads(text)
          except ValueError:
            return response.status, text
      return await work(post)
  return asyncio.run(whole())


def generate(ids, rid=None, **sampling):
  return {"input_ids": ids, "rid": rid, "return_logprob": True, "sampling_params": sampling}


async def until(post, condition):
  """Waits until `/server_info` satisfies a condition."""
  for _ in range(1500):
    _, info = await post("/server_info", method="GET")
    if condition(info):
      return info
    await asyncio.sleep(0.02)
  raise AssertionError(f"the server never got there: {info}")


def requests(count):
  return lambda info: info["running"] + info["queued"] == count


def test_64_concurrent_requests_get_their_own_answers(server):
  prompts = [np.random.default_rng(i).integers(0, 61, 5 + i).tolist() for i in range(80)]

  async def work(post):
    body = lambda i: generate(prompts[i], f"c{i}", max_new_tokens=6, temperature=0)  # noqa: E731
    together = await asyncio.gather(*(post("/generate", body(i)) for i in range(80)))
    for i in range(0, 80, 9):
      status, alone = await post("/generate", body(i))
      assert status == 200 and alone["output_ids"] == together[i][1]["output_ids"]
    return together
  for i, (status, answer) in enumerate(talk(server, work)):
    meta = answer["meta_info"]
    assert status == 200 and meta["id"] == f"c{i}" and meta["prompt_tokens"] == 5 + i
    assert [t for _, t, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["finish_reason"] == {"type": "length", "length": 6}


BAD = [
    ("/generate", generate([1] * 256), "longer than the context length"),
    ("/generate", generate([1, 61]), "outside the vocabulary"),
    ("/generate", generate([-1]), "outside the vocabulary"),
    ("/generate", generate([]), "empty"),
    ("/generate", generate(["a"]), "list of integers"),
    ("/generate", {"text": "hi"}, "no tokenizer"),
    ("/generate", generate([1], repetition_penalty=1.2), "repetition_penalty"),
    ("/generate", generate([1], json_schema="{}"), "json_schema"),
    ("/generate", generate([1], nonsense=1), "nonsense"),
    ("/generate", {**generate([1]), "stream": True}, "not offered"),
    ("/generate", [1, 2], "must be a JSON object"),
    ("/pause_generation", {"mode": "nap"}, "abort, retract, in_place"),
    ("/pause_generation", {"mode": 5}, "abort, retract, in_place"),
    ("/abort_request", {}, "abort_all"),
    ("/update_weights_from_disk", {}, "model_path"),
    ("/update_weights_from_disk", {"model_path": 5}, "model_path"),
    ("/flush_cache?timeout=soon", {}, "timeout"),
]


@pytest.mark.parametrize("path,body,text", BAD)
def test_bad_input_is_answered_400_with_a_reason(server, path, body, text):
  async def work(post):
    return await post(path, body), await post("/generate", generate([1, 2], max_new_tokens=2))
  (status, answer), (after, _) = talk(server, work)
  assert status == 400 and text in answer["error"]["message"]
  assert after == 200


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b"[" * 100000, b"NaN", b'{"input_ids": [1}'])
def test_malformed_json_is_answered_400(server, data):
  async def work(post):
    return await post("/generate", data=data), await post("/health", method="GET")
  (status, answer), (health, _) = talk(server, work)
  assert status == 400 and answer["error"]["message"] and health == 200


def test_an_unknown_path_is_answered_404(server):
  status, answer = talk(server, lambda post: post("/v1/chat/completions", {}))
  assert status == 404 and "/v1/chat/completions" in answer["error"]["message"]


def test_a_live_rid_is_refused(server):
  async def work(post):
    await post("/pause_generation", {"mode": "retract"})
    first = asyncio.create_task(post("/generate", generate([1, 2], "twin", max_new_tokens=2)))
    await until(post, requests(1))
    second = await post("/generate", generate([1, 2], "twin", max_new_tokens=2))
    await post("/continue_generation", {})
    return await first, second
  (first, _), (second, answer) = talk(server, work)
  assert first == 200 and second == 400 and "Duplicate request" in answer["error"]["message"]


def test_aborted_requests_answer_200_with_partial_output(server):
  async def work(post):
    await post("/pause_generation", {"mode": "in_place"})
    tasks = [asyncio.create_task(post("/generate", generate([i], f"a{i}", max_new_tokens=200)))
             for i in range(4)]
    await until(post, requests(4))
    await post("/abort_request", {"rid": "a0"})
    first = await tasks[0]
    await post("/abort_request", {"abort_all": True})
    rest = await asyncio.gather(*tasks[1:])
    await post("/continue_generation", {})
    return [first, *rest]
  for status, answer in talk(server, work):
    assert status == 200 and answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) < 200


def test_a_client_that_disconnects_aborts_its_request(server):
  async def work(post):
    await post("/pause_generation", {"mode": "retract"})
    task = asyncio.create_task(post("/generate", generate([1], "gone", max_new_tokens=200)))
    await until(post, requests(1))
    task.cancel()
    left = await until(post, requests(0))
    await post("/continue_generation", {})
    return left
  left = talk(server, work)
  assert (left["running"], left["queued"]) == (0, 0)


def test_weights_are_updated_under_load_and_every_token_knows_its_version(server, models):
  async def work(post):
    await post("/update_weights_from_disk", {
        "model_path": str(models / "a"), "weight_version": "0"})
    await post("/pause_generation", {"mode": "retract"})
    bodies = [generate([i % 61, 7], f"u{i}", max_new_tokens=250) for i in range(70)]
    tasks = [asyncio.create_task(post("/generate", body)) for body in bodies]
    await until(post, requests(70))
    _, info = await post("/server_info", method="GET")
    before = info["counts"]["output_tokens"]
    await post("/continue_generation", {})
    await until(post, lambda info: info["counts"]["output_tokens"] > before)
    await post("/pause_generation", {"mode": "retract"})
    update = await post("/update_weights_from_disk", {
        "model_path": str(models / "b"), "weight_version": "5", "flush_cache": True})
    await post("/continue_generation", {})
    return update, await asyncio.gather(*tasks), await post("/get_model_info", method="GET")
  (status, update), answers, (_, info) = talk(server, work)
  assert status == 200 and update["success"] and update["num_paused_requests"] > 0
  assert info["weight_version"] == "5" and info["model_path"] == str(models / "b")
  assert info["vocab_size"] == 61 and info["context_length"] == 256
  for status, answer in answers:
    spans = answer["meta_info"]["weight_versions"]
    assert status == 200 and len(answer["output_ids"]) == 250
    assert spans[0]["start"] == 0 and spans[-1]["end"] == 250
    assert [s["version"] for s in spans] in (["0"], ["0", "5"], ["5"])
    assert all(a["end"] == b["start"] for a, b in zip(spans, spans[1:]))
  finished_anew = [a for _, a in answers if a["meta_info"]["weight_version"] == "5"]
  assert len(finished_anew) == update["num_paused_requests"]


def test_weights_that_cannot_be_taken_change_nothing(server, models):
  async def work(post):
    _, before = await post("/model_info", method="GET")
    bad = [await post("/update_weights_from_disk", {
        "model_path": str(models / name), "weight_version": "9"}) for name in ("missing", "wide")]
    _, after = await post("/model_info", method="GET")
    return bad, before, after, await post("/generate", generate([1, 2], max_new_tokens=2))
  bad, before, after, (status, _) = talk(server, work)
  assert [s for s, _ in bad] == [400, 400] and not any(a["success"] for _, a in bad)
  assert "no model at" in bad[0][1]["message"] and "do not fit" in bad[1][1]["message"]
  assert after == before and status == 200


def test_flush_cache_forgets(server):
  ids = list(range(40))

  async def work(post):
    await post("/generate", generate(ids, max_new_tokens=2))
    _, again = await post("/generate", generate(ids, max_new_tokens=2))
    flushed = await post("/flush_cache?timeout=5", method="GET")
    _, cold = await post("/generate", generate(ids, max_new_tokens=2))
    return again["meta_info"]["cached_tokens"], flushed[0], cold["meta_info"]["cached_tokens"]
  assert talk(server, work) == (39, 200, 0)


def test_a_batch_answers_a_list(server):
  status, answers = talk(server, lambda post: post("/generate", {
      "input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 3}}))
  assert status == 200 and [len(a["output_ids"]) for a in answers] == [3, 3]


def test_the_client_finds_the_server_on_policy(server, models):
  async def work():
    client = PolicyClient(server.url)
    try:
      found = await client.check_on_policy()
      await client.update_weights(models / "a", 6)
      sampled = await client.generate([1, 2, 3], max_new_tokens=8, stop_ids=[], rid="k")
      scores = await client.score([1, 2, 3, *sampled.ids])
      with pytest.raises(ContextOverflow):
        await client.generate([1] * 300, max_new_tokens=8, stop_ids=[], rid="long")
      return found, sampled, scores
    finally:
      await client.aclose()
  found, sampled, scores = asyncio.run(work())
  assert found["reports_version"] and found["logprob_gap"] < 1e-4 and sampled.version == 6
  np.testing.assert_allclose(sampled.logprobs, scores[3:], atol=1e-4)


def test_health_and_info(server):
  async def work(post):
    return [await post(path, method="GET")
            for path in ("/health", "/health_generate", "/server_info", "/v1/models")]
  health, generated, (_, info), (_, models) = talk(server, work)
  assert health[0] == generated[0] == 200
  for name in ("tool_call_parser", "reasoning_parser", "preferred_sampling_params"):
    assert info[name] is None
  assert info["grammar_backend"] == "none" and info["max_running_requests"] == 64
  assert models["data"][0]["max_model_len"] == 256


def serve(*flags):
  return subprocess.run([sys.executable, "-m", "kr.serve", *flags], cwd=ROOT, capture_output=True,
                        text=True, timeout=60)


def test_a_port_in_use_is_one_clear_line(models):
  with socket.socket() as sock:
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    port = sock.getsockname()[1]
    done = serve(f"--model={models / 'a'}", f"--port={port}")
  assert done.returncode == 1 and f"port {port}" in done.stderr and "in use" in done.stderr
  assert "Traceback" not in done.stderr


def test_a_missing_model_is_one_clear_line(tmp_path):
  done = serve(f"--model={tmp_path / 'none'}", "--port=0")
  assert done.returncode == 1 and "there is no model at" in done.stderr
  assert "Traceback" not in done.stderr


def test_help_names_the_flags():
  done = serve("--help")
  assert "--model" in done.stdout and "--slots" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_cleanly(models, number):
  process = subprocess.Popen(
      [sys.executable, "-m", "kr.serve", f"--model={models / 'a'}", f"--port={free_port()}",
       "--slots=2", "--max_len=64", "--compile_cache="],
      cwd=ROOT, stderr=subprocess.PIPE, text=True)
  try:
    lines = []
    while not lines or "serving" not in lines[-1]:
      lines.append(process.stderr.readline())
      assert lines[-1], lines
    process.send_signal(number)
    assert process.wait(30) == 0
    assert "Traceback" not in process.stderr.read()
  finally:
    process.kill()
    process.wait()
    process.stderr.close()
