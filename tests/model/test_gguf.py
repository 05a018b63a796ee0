"""GGUF: a file made here, and the real SmolLM2-135M-Instruct against transformers."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
import tokenizers

from kr.model import gguf, hf, transformer
from kr.model.config import Execution

SMOLLM2 = pathlib.Path(__file__).resolve().parents[2] / "starts" / "smollm2"
D, F, V, L, H, K = 64, 96, 40, 2, 4, 2
HAVE = pytest.mark.skipif(not (SMOLLM2 / "config.json").is_file(),
                          reason="starts/smollm2 is not there: bash launch/smollm2.sh makes it")


def write(path, architecture="llama", extra=None, bad_tensor=False, pre="smollm", rows=F, eos=0):
  """A llama.cpp file with a byte-level tokenizer; its queries and keys are quantised.

  -> tensors, before they were."""
  library = pytest.importorskip("gguf")
  rng = np.random.default_rng(0)
  writer = library.GGUFWriter(path, architecture)
  writer.add_context_length(64)
  writer.add_embedding_length(D)
  writer.add_block_count(L)
  writer.add_feed_forward_length(F)
  writer.add_head_count(H)
  writer.add_head_count_kv(K)
  writer.add_rope_freq_base(5e3)
  writer.add_rope_dimension_count(D // H)
  writer.add_layer_norm_rms_eps(1e-5)
  writer.add_vocab_size(V)
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre(pre)
  tokens = ["<|end|>", *(chr(ord("a") + i) for i in range(26)), *map(str, range(10)), "ab", "Ġ",
            "Ġa"]
  writer.add_token_list(tokens)
  writer.add_token_types([3] + [1] * (V - 1))
  writer.add_token_merges(["a b", "Ġ a"])
  for add in (writer.add_bos_token_id, writer.add_pad_token_id, writer.add_unk_token_id):
    add(0)
  writer.add_eos_token_id(eos)
  if extra:
    writer.add_float32(*extra)

  written = {}

  def add(name, *shape):
    written[name] = x = rng.normal(1.0 if len(shape) == 1 else 0.0, 0.3, shape).astype(np.float32)
    if name.endswith(("attn_q.weight", "attn_k.weight")):
      kind = library.GGMLQuantizationType.Q8_0
      writer.add_tensor(name, library.quants.quantize(x, kind), raw_dtype=kind)
    else:
      writer.add_tensor(name, x)

  add("token_embd.weight", V, D)
  add("output_norm.weight", D)
  for i in range(L):
    for name, shape in {"attn_norm": (D,), "attn_q": (D, D), "attn_k": (D * K // H, D),
                        "attn_v": (D * K // H, D), "attn_output": (D, D), "ffn_norm": (D,),
                        "ffn_gate": (F, D), "ffn_up": (rows, D), "ffn_down": (D, F)}.items():
      if rows or name != "ffn_up":
        add(f"blk.{i}.{name}.weight", *shape)
  if bad_tensor:
    add("rope_freqs.weight", D // H // 2)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return written


@functools.partial(jax.jit, static_argnums=1)
def logits(params, cfg, tokens, positions, segments):
  how = Execution(scan=True)  # compiles one layer, not thirty
  return transformer.logits(
      params, transformer.forward(params, cfg, tokens, positions, segments, how))


def test_weights_are_what_was_quantised_and_rotary_pairs_stand_apart(tmp_path):
  written = write(tmp_path / "model.gguf")
  gguf.convert(tmp_path / "model.gguf", tmp_path / "out")
  params, cfg = hf.load(tmp_path / "out")
  assert (cfg.heads, cfg.kv_heads, cfg.rope_theta, cfg.norm_eps) == (H, K, 5e3, 1e-5)
  assert cfg.tied and cfg.family == "llama"
  found, h = hf.to_tensors(params, cfg), D // H
  for name, hf_name, heads in (("attn_q", "q_proj", H), ("attn_k", "k_proj", K)):
    w = np.empty_like(written[f"blk.1.{name}.weight"])
    for head in range(heads):  # llama.cpp turns rows 2i and 2i + 1 together, others i and i + h/2
      for i in range(h // 2):
        for part in range(2):
          w[head * h + i + part * h // 2] = written[f"blk.1.{name}.weight"][head * h + 2 * i + part]
    x = found[f"model.layers.1.self_attn.{hf_name}.weight"]
    np.testing.assert_allclose(x, w, atol=np.abs(w).max() / 250)  # 8 bits, signed
    assert not np.array_equal(x, w)
  for name, hf_name in (("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"),
                        ("blk.0.attn_v", "model.layers.0.self_attn.v_proj"),
                        ("blk.0.attn_output", "model.layers.0.self_attn.o_proj"),
                        ("blk.1.attn_norm", "model.layers.1.input_layernorm"),
                        ("blk.1.ffn_norm", "model.layers.1.post_attention_layernorm"),
                        ("blk.1.ffn_gate", "model.layers.1.mlp.gate_proj"),
                        ("blk.0.ffn_up", "model.layers.0.mlp.up_proj"),
                        ("blk.0.ffn_down", "model.layers.0.mlp.down_proj")):
    np.testing.assert_array_equal(found[hf_name + ".weight"], written[name + ".weight"])


def test_the_tokenizer_cuts_digits_and_merges_bytes(tmp_path):
  write(tmp_path / "model.gguf")
  gguf.convert(tmp_path / "model.gguf", tmp_path / "out")
  tok = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
  assert tok.encode("ab12<|end|> a").tokens == ["ab", "1", "2", "<|end|>", "Ġa"]
  assert tok.decode(tok.encode("ab12 a").ids) == "ab12 a"
  settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
  assert settings["eos_token"] == settings["pad_token"] == "<|end|>"


@pytest.mark.parametrize("changes, says", [
    (dict(architecture="gemma3"), "architecture 'gemma3' is not supported"),
    (dict(extra=("llama.rope.scaling.factor", 2.0)), "llama.rope.scaling.factor is not supported"),
    (dict(bad_tensor=True), "rope_freqs.weight is not supported"),
    (dict(pre="tekken"), "'tekken' is not supported"),
])
def test_what_is_not_supported_is_refused_by_name(changes, says, tmp_path):
  write(tmp_path / "model.gguf", **changes)
  with pytest.raises(hf.HfError, match=says):
    gguf.convert(tmp_path / "model.gguf", tmp_path / "out")
  assert not (tmp_path / "out").exists()


def test_a_damaged_file_is_named(tmp_path):
  path = tmp_path / "model.gguf"
  write(path)
  path.write_bytes(path.read_bytes()[:3000])
  with pytest.raises(hf.HfError, match="model.gguf is no GGUF file, or damaged"):
    gguf.convert(path, tmp_path / "out")


@pytest.fixture(scope="module")
def smollm2():
  return hf.load(SMOLLM2)


@pytest.mark.slow
@HAVE
def test_smollm2_computes_what_transformers_does_over_1024_tokens(smollm2):
  torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
  text = (pathlib.Path(__file__).resolve().parents[2] / "README.md").read_text()
  tok = tokenizers.Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json"))
  tokens = np.asarray([tok.encode(text).ids[:1024]])
  assert tokens.shape == (1, 1024)
  with torch.no_grad():
    model = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    theirs = model(torch.asarray(tokens)).logits.numpy()
  picked = np.take_along_axis(theirs[:, :-1], tokens[:, 1:, None], -1)[..., 0]
  likelihood = (picked - np.logaddexp.reduce(theirs[:, :-1], -1)).mean()
  assert likelihood > -4  # nats a token: the conversion made a model that reads English
  ours = logits(*smollm2, tokens, np.arange(1024)[None], np.ones_like(tokens))
  np.testing.assert_allclose(ours, theirs, atol=3e-4, rtol=0)


@pytest.mark.slow
@HAVE
def test_in_smollm2_end_of_turn_is_the_pad_token_and_is_seen_all_the_same(smollm2):
  settings = json.loads((SMOLLM2 / "config.json").read_text())
  end = settings["eos_token_id"]
  assert settings["pad_token_id"] == end
  prompts = [1, 500, end, 700, 800], [1, 600, end, end, 900, 40]

  def run(*rows):  # padding looks like the end of a turn
    tokens = np.full((1, 16), end, np.int32)
    place, segment = np.zeros((1, 16), np.int32), np.zeros((1, 16), np.int32)
    at = 0
    for i, row in enumerate(rows):
      where = slice(at, at := at + len(row))
      tokens[0, where], place[0, where], segment[0, where] = row, range(len(row)), i + 1
    out = np.asarray(logits(*smollm2, tokens, place, segment))[0]
    return np.split(out, np.cumsum([len(row) for row in rows]))[:-1]

  for prompt, packed in zip(prompts, run(*prompts)):
    alone, = run(prompt)
    np.testing.assert_allclose(packed, alone, atol=1e-4, rtol=0)
    without, = run([5 if t == end else t for t in prompt])
    assert np.abs(without[-1] - alone[-1]).max() > 0.1  # what comes after it depends on it


@pytest.mark.parametrize("changes, says", [
  ({"rows": 0}, "layers.0.mlp.up_proj.weight is missing"),
  ({"rows": F - 1}, "up_proj.weight is .95, 64., its fields mean .96, 64."),
  ({"eos": V}, "is damaged"),
], ids=["missing", "misshapen", "id"])
def test_a_file_that_is_no_whole_model_is_refused_and_nothing_written(changes, says, tmp_path):
  write(tmp_path / "m.gguf", **changes)
  with pytest.raises(hf.HfError, match=says):
    gguf.convert(tmp_path / "m.gguf", tmp_path / "out")
  assert not (tmp_path / "out").exists()


def test_a_truncated_file_is_refused(tmp_path):
  write(tmp_path / "m.gguf")
  data = (tmp_path / "m.gguf").read_bytes()
  for size in (0, 3, 20, 500, len(data) // 2, len(data) - 64):
    (tmp_path / "m.gguf").write_bytes(data[:size])
    with pytest.raises(hf.HfError, match="m.gguf is no GGUF file, or damaged"):
      gguf.convert(tmp_path / "m.gguf", tmp_path / "out")
