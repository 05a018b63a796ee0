"""The client against a small server that speaks, and breaks, the contract."""

import asyncio
import json
import math

from aiohttp import web
import pytest

from kr.agent.policy import ContextOverflow, OffPolicyError, PolicyClient, PolicyError

VOCAB = 50
REFUSAL = "The input (4097 tokens) is longer than the model's context length (4096 tokens)."


def logprob(token):
  return -math.log(2) - token / 100


class FakeServer:
  """Samples 7, 8 and the stop token; `script` holds special behaviour of /generate, in order."""

  def __init__(self):
    self.script = []
    self.log = []  # (path, body)
    self.settings = {"vocab_size": VOCAB, "dtype": "float32"}
    self.version = "default"
    self.flush_failures = 0
    self.update_answer = None
    self.gap = 0.0
    self.aborted = asyncio.Event()

  async def handle(self, request):
    body = await request.json() if request.can_read_body else {}
    self.log.append((request.path, body))
    if request.path == "/generate" and self.script[:1] == ["drop"]:
      self.script.pop(0)
      request.transport.abort()
      return web.Response()
    name = request.path.strip("/")
    return await getattr(self, name, self.plain)(body)

  async def plain(self, body):
    return web.Response(text="ok")

  async def server_info(self, body):
    return web.json_response(self.settings)

  async def get_model_info(self, body):
    return web.json_response({"model_path": "/nowhere", "weight_version": self.version})

  async def abort_request(self, body):
    self.aborted.set()
    return web.Response()

  async def flush_cache(self, body):
    self.flush_failures -= 1
    return web.Response(status=400 if self.flush_failures >= 0 else 200, text="busy")

  async def update_weights_from_disk(self, body):
    self.version = body["weight_version"]
    status, answer = self.update_answer or (200, {"success": True, "message": "ok"})
    return web.json_response(answer, status=status)

  async def generate(self, body):
    step = self.script.pop(0) if self.script else None
    if isinstance(step, web.Response):
      return step
    if callable(step):
      return await step(body)
    ids = body["input_ids"]
    if body["sampling_params"]["max_new_tokens"] == 0:
      return web.json_response({"output_ids": [], "meta_info": {
          "finish_reason": {"type": "length"}, "input_token_logprobs": [
              [logprob(t) if i else None, t, None] for i, t in enumerate(ids)]}})
    return web.json_response(answer(ids, self.gap, self.version, **(step or {})))


def answer(ids, gap=0.0, version="3", **changes):
  out = [7, 8, 2]
  meta = {"finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": len(ids),
          "cached_tokens": 1, "weight_version": version,
          "output_token_logprobs": [[logprob(t) + gap, t, None] for t in out]}
  return {"output_ids": out, "meta_info": {**meta, **changes.pop("meta", {})}, **changes}


def serve(test, **options):
  """Runs `test(server, client)` against a server of its own."""
  async def main():
    server = FakeServer()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    client = PolicyClient(f"http://127.0.0.1:{port}/", **{
        "retries": 2, "backoff_s": 0.001, "timeout_s": 20, **options})
    try:
      return await test(server, client)
    finally:
      await client.aclose()
      await runner.cleanup()
  return asyncio.run(main())


def sample(client, ids=(1, 4), **options):
  options = {"max_new_tokens": 9, "stop_ids": [2], "rid": "r.", **options}
  return client.generate(list(ids), **options)


def requests(server, path="/generate"):
  return [body for p, body in server.log if p == path]


def test_a_turn_is_the_ids_and_logprobs_that_the_server_names():
  async def test(server, client):
    server.version = "12"
    return await sample(client), requests(server)
  sampled, (body,) = serve(test)
  assert sampled.ids == [7, 8, 2] and sampled.version == 12 and sampled.finish == "stop"
  assert sampled.logprobs == pytest.approx([logprob(7), logprob(8), logprob(2)])
  assert (sampled.prompt_tokens, sampled.cached_tokens, sampled.mixed) == (2, 1, False)
  assert body["input_ids"] == [1, 4] and body["rid"] == "r." and body["return_logprob"] is True
  assert body["sampling_params"] == {
      "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
      "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0, "max_new_tokens": 9,
      "stop_token_ids": [2], "ignore_eos": False, "no_stop_trim": True,
      "skip_special_tokens": False, "spaces_between_special_tokens": False}


def test_an_evaluation_may_sample_at_another_temperature():
  async def test(server, client):
    await sample(client, temperature=0.5)
    return requests(server)[0]["sampling_params"]["temperature"]
  assert serve(test) == 0.5


@pytest.mark.parametrize("ids", [(1, VOCAB), (-1,), ()])
def test_ids_outside_the_vocabulary_never_reach_the_server(ids):
  async def test(server, client):
    with pytest.raises(PolicyError, match="vocabulary|empty prompt"):
      await sample(client, ids)
    return requests(server)
  assert serve(test) == []


def test_a_vocabulary_that_the_server_does_not_tell_is_read_beside_its_model(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 5}))

  async def test(server, client):
    server.settings = {"model_path": str(tmp_path)}
    server.get_model_info = server.server_info
    with pytest.raises(PolicyError, match="token id 6 is outside the model's vocabulary of 5"):
      await sample(client, [6])
  serve(test)


def test_5xx_is_retried_under_the_same_rid_after_an_abort():
  async def test(server, client):
    server.script = [web.Response(status=500), web.Response(status=503, text="loading")]
    sampled = await sample(client)
    return sampled, [(p, b["rid"]) for p, b in server.log if "rid" in b]
  sampled, log = serve(test)
  assert sampled.ids == [7, 8, 2]
  assert log == [("/generate", "r."), ("/abort_request", "r."), ("/generate", "r."),
                 ("/abort_request", "r."), ("/generate", "r.")]


def test_a_dropped_connection_and_a_timeout_are_retried():
  async def test(server, client):
    async def hang(body):
      await asyncio.sleep(30)
    server.script = ["drop", hang]
    return await sample(client), len(requests(server))
  sampled, n = serve(test, timeout_s=0.3)
  assert sampled.ids == [7, 8, 2] and n == 3


def test_a_rid_that_is_stuck_on_the_server_is_aborted_and_replaced():
  async def test(server, client):
    server.script = [web.json_response(
        {"error": {"message": "Duplicate request ID detected: r."}}, status=400)]
    sampled = await sample(client)
    return sampled, [(p, b["rid"]) for p, b in server.log if "rid" in b]
  sampled, log = serve(test)
  assert sampled.ids == [7, 8, 2]
  assert log == [("/generate", "r."), ("/abort_request", "r."), ("/generate", "r.1.")]


def test_cancelling_aborts_the_rid_that_replaced_a_stuck_one():
  async def test(server, client):
    async def hang(body):
      await asyncio.sleep(20)
    server.script = [web.json_response(
        {"error": {"message": "Duplicate request ID detected: r."}}, status=400), hang]
    job = asyncio.create_task(sample(client))
    while len(requests(server)) < 2:
      await asyncio.sleep(0.005)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
      await job
    return requests(server, "/abort_request")
  assert serve(test) == [{"rid": "r."}, {"rid": "r.1."}]


def test_a_turn_asks_for_no_more_than_the_servers_context_holds():
  async def test(server, client):
    server.settings["context_length"] = 10
    await sample(client, [1] * 4, max_new_tokens=9)
    await sample(client, [1] * 4, max_new_tokens=5)
    await sample(client, [1] * 12, max_new_tokens=5)  # the server's to refuse
    return [r["sampling_params"]["max_new_tokens"] for r in requests(server)]
  assert serve(test) == [6, 5, 1]


def test_a_dead_server_gives_one_clear_message():
  async def test():
    client = PolicyClient("http://127.0.0.1:9", retries=1, backoff_s=0.001, vocab_size=VOCAB)
    assert not await client.healthy()
    with pytest.raises(PolicyError, match=r"127\.0\.0\.1:9 failed 2 times.*is it running"):
      await sample(client)
    await client.aclose()
  asyncio.run(test())


def test_retries_end_with_the_servers_message():
  async def test(server, client):
    async def fail(body):
      return web.Response(status=500, text="out of memory")
    server.script = [fail] * 3
    with pytest.raises(PolicyError, match="failed 3 times on /generate: HTTP 500: out of memory"):
      await sample(client)
  serve(test)


def test_a_refused_request_is_an_error_at_once_with_the_servers_message():
  async def test(server, client):
    server.script = [web.json_response({"error": {"message": "bad top_p"}}, status=400)]
    with pytest.raises(PolicyError, match=r"HTTP 400\): bad top_p"):
      await sample(client)
    return len(requests(server))
  assert serve(test) == 1


def test_an_over_long_prompt_is_a_context_overflow():
  async def test(server, client):
    server.script = [web.json_response({"error": {"message": REFUSAL}}, status=400)]
    with pytest.raises(ContextOverflow, match="4097 tokens"):
      await sample(client)
    server.script = [{"meta": {"finish_reason": {"type": "abort", "message": REFUSAL}}}]
    with pytest.raises(ContextOverflow):
      await sample(client)
  serve(test)


def test_cancelling_aborts_the_request_on_the_server():
  async def test(server, client):
    async def hang(body):
      await server.aborted.wait()
      return web.json_response(answer(body["input_ids"]))
    server.script = [hang]
    job = asyncio.create_task(sample(client))
    while not requests(server):
      await asyncio.sleep(0.005)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
      await job
    return requests(server, "/abort_request")
  assert serve(test) == [{"rid": "r."}]


def test_a_turn_of_several_versions_is_rejected():
  async def test(server, client):
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    server.script = [{"meta": {"weight_versions": spans}},
                     {"meta": {"weight_versions": spans[:1], "weight_version": "4"}},
                     {"meta": {"finish_reason": {"type": "abort", "message": "aborted"},
                               "output_token_logprobs": []}}]
    return [await sample(client) for _ in range(3)]
  mixed, single, aborted = serve(test)
  assert (mixed.finish, mixed.mixed) == ("abort", True)
  assert (single.finish, single.version) == ("stop", 3)  # The version that sampled it, not today's.
  assert (aborted.finish, aborted.mixed) == ("abort", False)


@pytest.mark.parametrize("changes, message", [
    ({"output_ids": [7, 9, 2]}, "not the 3 it sampled"),
    ({"output_ids": [7, 8]}, "not the 2 it sampled"),
    ({"meta": {"output_token_logprobs": []}}, "logprobs of 0 tokens"),
    ({"meta": {"output_token_logprobs": [[None, 7, None], [-1, 8, None], [-1, 2, None]]}},
     "None as a log-probability"),
    ({"meta": {"output_token_logprobs": [[float("nan"), 7, None], [-1, 8, 0], [-1, 2, 0]]}},
     "nan as a log-probability"),
    ({"meta": {"finish_reason": {"type": "tired"}}}, "unknown reason"),
    ({"meta": {"finish_reason": None}}, "lacks finish_reason"),
    ({"meta_info": None}, "lacks meta_info"),
    ({"meta": {"weight_version": "best"}}, "kr numbers versions")])
def test_an_answer_that_cannot_be_trusted_is_an_error(changes, message):
  async def test(server, client):
    server.script = [changes]
    with pytest.raises(PolicyError, match=message):
      await sample(client)
  serve(test)


def test_ids_come_from_the_logprobs_when_the_server_adds_extra_ones():
  async def test(server, client):
    server.script = [{"output_ids": [1, 7, 8, 2]}]
    return await sample(client)
  assert serve(test).ids == [7, 8, 2]


def test_a_server_without_versions_counts_what_the_client_published():
  async def test(server, client):
    server.get_model_info = server.server_info
    await client.update_weights("/weights", 6)
    server.script = [{"meta": {"weight_version": None}}]
    return await sample(client)
  assert serve(test).version == 6


def test_score_gives_one_logprob_per_id():
  async def test(server, client):
    return await client.score([1, 4, 7]), requests(server)
  scores, (body,) = serve(test)
  assert scores == pytest.approx([0.0, logprob(4), logprob(7)])
  assert body["logprob_start_len"] == 0 and body["sampling_params"]["temperature"] == 1.0


def test_publishing_pauses_updates_and_resumes():
  async def test(server, client):
    await client.update_weights("/weights", 5)
    return [p for p, _ in server.log], requests(server, "/update_weights_from_disk")
  paths, (body,) = serve(test)
  assert paths == ["/pause_generation", "/update_weights_from_disk", "/continue_generation",
                   "/get_model_info"]
  assert body == {"model_path": "/weights", "weight_version": "5", "flush_cache": True}


def test_publishing_leaves_a_pause_of_the_callers_alone():
  async def test(server, client):
    await client.pause()
    await client.update_weights("/weights", 5)
    return [p for p, _ in server.log]
  assert "/continue_generation" not in serve(test)


def test_weights_that_changed_without_a_flush_are_flushed_until_it_works():
  async def test(server, client):
    server.flush_failures = 2
    server.update_answer = 400, {
        "success": False, "message": "Weights were updated, but the cache was not flushed"}
    await client.update_weights("/weights", 5)
    return len(requests(server, "/flush_cache"))
  assert serve(test) == 3


def test_a_failed_publication_says_why_and_resumes():
  async def test(server, client):
    server.update_answer = 400, {"success": False, "message": "no such directory"}
    with pytest.raises(PolicyError, match="no such directory"):
      await client.update_weights("/weights", 5)
    assert server.log[-1][0] == "/continue_generation"
    server.update_answer = None

    async def other(body):
      return web.json_response({"weight_version": "9"})
    server.get_model_info = other
    with pytest.raises(PolicyError, match="reports weight version '9' after version 6"):
      await client.update_weights("/weights", 6)
  serve(test)


def test_abort_addresses_one_request_or_all():
  async def test(server, client):
    await client.abort("r.")
    await client.abort()
    assert await client.healthy()
    return requests(server, "/abort_request")
  assert serve(test) == [{"rid": "r."}, {"abort_all": True}]


def test_a_faithful_server_passes_the_on_policy_check():
  async def test(server, client):
    return await client.check_on_policy([1, 3])
  found = serve(test)
  assert found["logprob_gap"] < 1e-9 and found["reports_version"]


@pytest.mark.parametrize("sampling, settings, gap, message", [
    ({"top_p": 0.9}, {}, 0, "top_p=0.9"),
    ({"temperature": 0.7}, {}, 0, "temperature=0.7"),
    (None, {"tool_call_parser": "qwen25"}, 0, "tool_call_parser='qwen25'.*without --tool-call"),
    (None, {"grammar": "root"}, 0, "grammar='root'"),
    (None, {}, -0.2, "differ from its own scores"),
    (None, {"dtype": "bfloat16"}, -0.2, "allowed: 0.05")])
def test_the_on_policy_check_refuses_and_names_the_setting(sampling, settings, gap, message):
  async def test(server, client):
    server.settings.update(settings)
    server.gap = gap
    with pytest.raises(OffPolicyError, match=message):
      await client.check_on_policy()
  serve(test, sampling=sampling)


def test_a_hundred_turns_wait_at_once():
  async def test(server, client):
    waiting = asyncio.Barrier(150)

    async def together(body):
      await waiting.wait()
      return web.json_response(answer(body["input_ids"]))
    server.script = [together] * 150
    return await asyncio.gather(*(sample(client, rid=f"{i}.") for i in range(150)))
  assert len(serve(test)) == 150
