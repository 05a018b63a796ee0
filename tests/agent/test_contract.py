"""The inference contract: the same promises, kept by kr.serve and by SGLang, each as a real server.

A test speaks HTTP where it is about the server, and through PolicyClient where a server has a
trap that the client is there to handle.
"""

import asyncio
import json

import numpy as np
import pytest

from contract_fixtures import (
    MAX_LEN, ROOT, VOCAB, aborted_with_tokens, assert_sampled_by, body, distribution, finish,
    make_policy, midway, prompt, publish, reference, sampled, spans, talk)
from kr.agent.policy import ContextOverflow, PolicyError
from kr.rl.server import ServerProcess


@pytest.fixture(name="other", scope="module")
def fixture_other(tmp_path_factory):
  """A policy of the same shape and other weights."""
  return make_policy(tmp_path_factory.mktemp("other") / "model", 2)


@pytest.fixture(name="server", scope="module", params=["kr", *[
    pytest.param(kind, marks=pytest.mark.slow) for kind in ("sglang", "sglang_jax")]])
def fixture_server(request, tmp_path_factory):
  """A server on a policy, which lies in `server.model`."""
  kind = request.param
  stamp = ROOT / f".venv-{kind}".replace("_", "-") / f"kr-{kind}.stamp".replace("_", "-")
  if kind != "kr" and not stamp.is_file():
    pytest.skip(f"{kind} is not installed: bash launch/{kind}.sh --install"
                + (", or launch/test.sh --all" if kind == "sglang" else ""))
  log = tmp_path_factory.mktemp("log") / "server.log"
  with ServerProcess(make_policy(tmp_path_factory.mktemp("policy") / "model", 1), kind=kind,
                     slots=16, max_len=MAX_LEN, log=log, start_timeout_s=600) as server:
    yield server
    assert server.healthy(), log.read_text()[-5000:]


# ---------------------------------------------------------------------------- sampling


def test_ids_go_in_and_ids_with_the_learners_logprobs_come_out(server):
  ids = prompt(0)
  status, answer = talk(server, lambda post, _: post("/generate", body(ids, "r1.", 40)))
  out, logprobs = sampled(answer)
  meta = answer["meta_info"]
  assert status == 200 and len(out) == 40 and all(0 <= t < VOCAB for t in out)
  assert meta["id"] == "r1." and meta["prompt_tokens"] == len(ids)
  assert meta["finish_reason"] == {"type": "length", "length": 40}
  assert_sampled_by(server.model, ids, out, logprobs)


def test_a_stop_token_ends_the_output_and_stays_in_it(server):
  async def work(post, client):
    _, whole = await post("/generate", body(prompt(1), tokens=24, temperature=0))
    stop = whole["output_ids"][10]
    _, cut = await post("/generate", body(prompt(1), tokens=24, temperature=0,
                                          stop_token_ids=[stop], ignore_eos=False))
    turn = await client.generate(prompt(1), max_new_tokens=24, stop_ids=[stop], rid="s.",
                                 temperature=0.0)
    return whole["output_ids"], stop, cut, turn
  whole, stop, cut, turn = talk(server, work)
  want = whole[:whole.index(stop) + 1]
  assert cut["output_ids"] == want and turn.ids == want and turn.finish == "stop"
  assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_sampling_at_temperature_1_follows_the_models_distribution(server):
  ids, count = prompt(2), 400

  async def work(post, client):
    answers = []
    for _ in range(count // 50):
      _, batch = await post("/generate", body([ids] * 50, tokens=1))
      answers += batch
    return answers
  answers = talk(server, work)
  p = np.exp(distribution(server.model, ids)[-1])
  seen = np.bincount([a["output_ids"][0] for a in answers], minlength=VOCAB) / count
  likely = p > 0.05
  assert likely.any()
  # Five standard deviations: a wrong temperature or a cut tail lies far outside.
  np.testing.assert_array_less(np.abs(seen - p)[likely], 5 * np.sqrt(p * (1 - p) / count)[likely])
  assert abs(seen[~likely].sum() - p[~likely].sum()) < 5 * np.sqrt(0.25 / count)


def test_the_samples_of_a_group_differ(server):
  async def work(post, client):
    return await asyncio.gather(*(post("/generate", body(prompt(3), f"g{i}.", 30))
                                  for i in range(8)))
  answers = talk(server, work)
  assert len({tuple(answer["output_ids"]) for _, answer in answers}) > 4


def test_a_batch_answers_in_its_order_as_single_requests_do(server):
  prompts = [prompt(i, 4 + i) for i in range(5)]

  async def work(post, client):
    together = await post("/generate", body(prompts, tokens=6, temperature=0))
    alone = [await post("/generate", body(p, tokens=6, temperature=0)) for p in prompts]
    return together, alone
  (status, together), alone = talk(server, work)
  assert status == 200 and len(together) == 5
  assert [a["output_ids"] for a in together] == [a["output_ids"] for _, a in alone]
  assert [a["meta_info"]["prompt_tokens"] for a in together] == [4, 5, 6, 7, 8]


def test_a_prompt_over_the_context_is_refused_and_the_client_says_overflow(server):
  async def work(post, client):
    refused = await post("/generate", body([1] * (MAX_LEN + 40)))
    with pytest.raises(ContextOverflow, match="context"):
      await client.generate([1] * (MAX_LEN + 40), max_new_tokens=8, stop_ids=[], rid="long.")
    return refused, await post("/generate", body(prompt(4)))
  (refused, answer), (after, _) = talk(server, work)
  assert refused == 400 and "context length" in answer["error"]["message"]
  assert after == 200


def test_a_turn_that_asks_for_more_than_the_context_holds_gets_what_is_left(server):
  async def work(post, client):
    return await client.generate(prompt(5, MAX_LEN - 10), max_new_tokens=200, stop_ids=[], rid="f.")
  turn = talk(server, work)
  assert turn.finish in ("length", "stop") and 0 < len(turn.ids) < 30


def test_a_given_sequence_is_scored_as_it_was_sampled(server):
  async def work(post, client):
    turn = await client.generate(prompt(6), max_new_tokens=40, stop_ids=[], rid="k.")
    return turn, await client.score([*prompt(6), *turn.ids])
  turn, scores = talk(server, work)
  assert scores[0] == 0.0 and len(scores) == 12 + len(turn.ids)
  np.testing.assert_allclose(scores[12:], turn.logprobs, atol=1e-4)
  want = reference(server.model, [*prompt(6), *turn.ids])
  np.testing.assert_allclose(scores[1:], want, atol=1e-4)


def test_the_next_turn_reuses_the_prefix_and_a_flush_forgets_it(server):
  async def work(post, client):
    first = await client.generate(prompt(7, 60), max_new_tokens=20, stop_ids=[], rid="t.1.")
    history = [*prompt(7, 60), *first.ids, *prompt(8, 9)]
    second = await client.generate(history, max_new_tokens=5, stop_ids=[], rid="t.2.")
    await client.flush()
    cold = await client.generate(history, max_new_tokens=5, stop_ids=[], rid="t.3.")
    return len(first.ids), second, cold
  sampled_tokens, second, cold = talk(server, work)
  assert second.cached_tokens >= 60 + sampled_tokens - 1  # The newest token was never an input.
  assert cold.cached_tokens == 0 and cold.prompt_tokens == second.prompt_tokens


def test_streaming_gives_the_same_tokens_or_is_refused_by_name(server):
  ask = {**body(prompt(9), tokens=20, temperature=0)}

  async def work(post, client):
    _, whole = await post("/generate", ask)
    return whole["output_ids"], await post("/generate", {**ask, "stream": True})
  whole, (status, streamed) = talk(server, work)
  if status == 400:
    assert "stream" in streamed["error"]["message"]
    return
  lines = [line[len("data: "):] for line in streamed.split("\n\n") if line.startswith("data: ")]
  assert status == 200 and lines[-1] == "[DONE]" and len(lines) > 2
  assert json.loads(lines[-2])["output_ids"] == whole


# ---------------------------------------------------------------------------- abort, pause


def test_an_aborted_request_keeps_its_partial_tokens(server):
  async def work(post, client):
    async def act(n):
      return await post("/abort_request", {"rid": f"m{n}.0."})
    return await midway(post, act, requests=1, partial=aborted_with_tokens)
  (status, _), (answer,) = talk(server, work)
  out, logprobs = sampled(answer)
  assert status == 200 and 0 < len(out) < 500
  assert_sampled_by(server.model, prompt(0), out, logprobs)


def test_aborting_all_ends_every_request_with_its_partial_tokens(server):
  async def work(post, client):
    async def act(n):
      await client.abort()
    return (await midway(post, act, partial=aborted_with_tokens))[1]
  for answer in talk(server, work):
    assert 0 < len(sampled(answer)[0]) < 500


def test_an_abort_of_nothing_is_no_error(server):
  async def work(post, client):
    await client.abort("never seen")
    await client.abort()
    return await post("/generate", body(prompt(10)))
  status, answer = talk(server, work)
  assert status == 200 and finish(answer) == "length"


def test_a_cancelled_turn_is_ended_on_the_server_and_its_rid_is_free_again(server):
  async def work(post, client):
    await client.pause()  # so that it cannot end by itself
    turn = asyncio.create_task(
        client.generate(prompt(11), max_new_tokens=600, stop_ids=[], rid="gone."))
    await asyncio.sleep(0.3)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
      await turn
    await client.resume()
    return await client.generate(prompt(11), max_new_tokens=3, stop_ids=[], rid="gone.")
  assert 0 < len(talk(server, work).ids) <= 3


def test_pausing_with_abort_ends_what_runs_and_new_requests_wait(server):
  async def work(post, client):
    async def act(n):
      await client.pause("abort")
      waiting = asyncio.create_task(post("/generate", body(prompt(12), f"w{n}.", 4)))
      done, _ = await asyncio.wait({waiting}, timeout=0.5)
      await client.resume()
      return bool(done), await waiting
    return await midway(post, act, partial=aborted_with_tokens)
  (was_done, (status, late)), answers = talk(server, work)
  assert all(len(sampled(a)[0]) < 500 for a in answers)
  assert not was_done and status == 200 and len(late["output_ids"]) == 4


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_request_goes_on_and_each_token_knows_its_version(server, other, mode):
  """retract computes the keys and values again under the new weights, in_place keeps the old."""
  async def work(post, client):
    await client.update_weights(server.model, 1)

    async def act(n):
      await client.pause(mode)
      before = await client.info()
      update = await publish(post, other, str(10 + n), flush_cache=mode == "retract")
      await client.resume()
      return before, update, 10 + n

    def partial(answer):
      return len(spans(answer)) == 2
    found = await midway(post, act, partial=partial)
    await client.update_weights(server.model, 1)
    return found
  (before, (status, update), new), answers = talk(server, work)
  assert status == 200 and update["success"]
  for i, answer in enumerate(answers):
    out, logprobs = sampled(answer)
    (old, start, cut), (now, again, end) = spans(answer)
    assert (old, now) == (str(before["weight_version"]), str(new))
    assert start == 0 < cut == again < end == len(out) == 500
    assert finish(answer) == "length" and answer["meta_info"]["weight_version"] == str(new)
    assert_sampled_by(before["model_path"], prompt(i), out[:cut], logprobs[:cut])
    if mode == "retract":
      assert_sampled_by(other, prompt(i) + out[:cut], out[cut:], logprobs[cut:])


# ---------------------------------------------------------------------------- weights


def test_publishing_changes_what_is_sampled_and_its_version(server, other):
  async def work(post, client):
    await client.update_weights(other, 21)
    new = await client.generate(prompt(13), max_new_tokens=12, stop_ids=[], rid="v.1.")
    info = await client.info()
    await client.update_weights(server.model, 22)
    old = await client.generate(prompt(13), max_new_tokens=12, stop_ids=[], rid="v.2.")
    return new, old, info
  new, old, info = talk(server, work)
  assert (new.version, old.version, str(info["weight_version"])) == (21, 22, "21")
  for path, turn in ((other, new), (server.model, old)):
    assert_sampled_by(path, prompt(13), turn.ids, turn.logprobs)


def test_publishing_under_load_mixes_no_turn_unnoticed(server, other):
  """What one version sampled is whole; what two sampled is reported as aborted and mixed."""
  async def work(post, client):
    await client.update_weights(server.model, 30)
    turns = [asyncio.create_task(client.generate(
        prompt(i, 20), max_new_tokens=20 + 20 * i, stop_ids=[], rid=f"l{i}.")) for i in range(12)]
    await asyncio.sleep(0.2)
    for version, path in ((31, other), (32, server.model), (33, other)):
      await client.update_weights(path, version)
      await asyncio.sleep(0.1)
    done = await asyncio.gather(*turns)
    late = await client.generate(prompt(14), max_new_tokens=9, stop_ids=[], rid="late.")
    await client.update_weights(server.model, 34)
    return done, late
  done, late = talk(server, work)
  for i, turn in enumerate(done):
    assert turn.mixed == (turn.finish == "abort")
    if not turn.mixed:
      path = other if turn.version in (31, 33) else server.model
      assert_sampled_by(path, prompt(i, 20), turn.ids, turn.logprobs)
  assert late.version == 33 and late.finish in ("length", "stop")


def test_without_a_pause_running_requests_finish_under_their_weights(server, other):
  async def work(post, client):
    await client.update_weights(server.model, 40)
    tasks = [asyncio.create_task(post("/generate", body(prompt(i), f"q{i}.", 60)))
             for i in range(3)]
    await asyncio.sleep(0.1)
    status, update = await publish(post, other, "41", flush_cache=False)
    answers = await asyncio.gather(*tasks)
    await client.update_weights(server.model, 42)
    return status, update, answers
  status, update, answers = talk(server, work)
  assert status == 200 and update["success"]
  for _, answer in answers:
    assert len(spans(answer)) == 1 and len(answer["output_ids"]) == 60


def test_weights_that_are_not_there_are_an_error_and_change_nothing(server):
  async def work(post, client):
    await client.update_weights(server.model, 50)
    with pytest.raises(PolicyError, match="nowhere"):
      await client.update_weights(ROOT / "nowhere", 51)
    return await client.info(), await client.generate(
        prompt(15), max_new_tokens=5, stop_ids=[], rid="n.")
  info, turn = talk(server, work)
  assert str(info["weight_version"]) == "50" and turn.version == 50
  assert_sampled_by(server.model, prompt(15), turn.ids, turn.logprobs)


# ---------------------------------------------------------------------------- the rest


def test_the_server_is_on_policy_and_tells_what_it_is(server):
  async def work(post, client):
    return (await client.check_on_policy(prompt(16)), await client.info(), await client.healthy(),
            await post("/health", method="GET"), await post("/health_generate", method="GET"))
  found, info, healthy, (health, _), (generated, _) = talk(server, work)
  assert found["reports_version"] and found["logprob_gap"] < 1e-4
  assert info["model_path"] == server.model and healthy and health == generated == 200


BAD = [
    {"sampling_params": {}},
    {"input_ids": ["a", "b"]},
    {**body([1, 2]), "sampling_params": {"temperature": -1.0}},
    {**body([1, 2]), "sampling_params": {"top_p": 2.0}},
    {**body([1, 2]), "sampling_params": {"max_new_tokens": -1}},
    {**body([1, 2]), "sampling_params": {"nonsense": 1}},
]


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_with_a_reason_and_the_server_goes_on(server, bad):
  async def work(post, client):
    return await post("/generate", bad), await post("/generate", body([1, 2], tokens=2))
  (status, answer), (after, _) = talk(server, work)
  assert 400 <= status < 500 and answer and after == 200


def test_malformed_json_and_an_unknown_mode_are_refused(server):
  async def work(post, client):
    return (await post("/generate", data=b"{"), await post("/pause_generation", {"mode": "nap"}),
            await post("/generate", body([1, 2], tokens=2)))
  (broken, _), (mode, _), (after, _) = talk(server, work)
  assert 400 <= broken < 500 and 400 <= mode < 500 and after == 200


def test_ids_outside_of_the_vocabulary_never_reach_the_server(server):
  async def work(post, client):
    for ids in ([1, VOCAB], [-1], [2 ** 40], []):
      with pytest.raises(PolicyError, match="vocabulary|empty prompt"):
        await client.generate(ids, max_new_tokens=4, stop_ids=[], rid="b.")
    return await client.healthy(), await post("/generate", body([1, 2], tokens=2))
  healthy, (after, _) = talk(server, work)
  assert healthy and after == 200
