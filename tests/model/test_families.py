"""Every family against transformers: logits, gradients, weights there and back, cached decoding."""

import dataclasses
import functools
import json

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from kr.model import decode, families, hf, transformer
from kr.model.config import Execution
from kr.rl import loss

SMALL = dict(vocab_size=61, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, intermediate_size=40, max_position_embeddings=128,
             rms_norm_eps=1e-5, initializer_range=0.2)
EXPERTS = dict(head_dim=8, moe_intermediate_size=16, num_experts=6, num_experts_per_tok=2)
LATENT = dict(num_key_value_heads=4, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4,
              v_head_dim=6, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=16,
              n_shared_experts=2, routed_scaling_factor=2.446, norm_topk_prob=True,
              num_nextn_predict_layers=0)
# Name -> what config.json says. Every option that changes the result is somewhere; scalings are
# so strong, and windows so short, that they matter within 24 tokens.
CASES = {
    "llama2": dict(model_type="llama", num_key_value_heads=4, num_hidden_layers=3),
    "llama3": dict(
        model_type="llama", attention_bias=True, mlp_bias=True, rope_theta=5e3,
        rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                          high_freq_factor=4.0, original_max_position_embeddings=20)),
    "llama-linear": dict(model_type="llama", head_dim=10, tie_word_embeddings=True,
                         rope_scaling=dict(type="linear", factor=3.0)),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True, use_sliding_window=True,
                  sliding_window=5, max_window_layers=1, rope_parameters=dict(
                      rope_type="yarn", rope_theta=1e3, factor=4.0,
                      original_max_position_embeddings=16)),
    "qwen3": dict(model_type="qwen3", head_dim=8, attention_bias=True, use_sliding_window=True,
                  sliding_window=4, rope_theta=1e3,
                  layer_types=["sliding_attention", "full_attention"],
                  rope_scaling=dict(rope_type="yarn", factor=4.0, attention_factor=1.3,
                                    beta_fast=8.0, beta_slow=0.5, truncate=False,
                                    original_max_position_embeddings=16)),
    "qwen3-moe": dict(model_type="qwen3_moe", **EXPERTS, norm_topk_prob=True,
                      mlp_only_layers=[1], use_sliding_window=True, sliding_window=6),
    "qwen3-moe-sparse": dict(model_type="qwen3_moe", **EXPERTS, norm_topk_prob=False,
                             decoder_sparse_step=2, attention_bias=True),
    "deepseek-v3": dict(
        model_type="deepseek_v3", **LATENT, num_hidden_layers=3, q_lora_rank=20,
        n_group=4, topk_group=2, first_k_dense_replace=1, attention_bias=True,
        rope_scaling=dict(type="yarn", factor=8.0, mscale=1.0, mscale_all_dim=0.7, beta_fast=32,
                          beta_slow=1, original_max_position_embeddings=16)),
    "moonlight": dict(
        model_type="deepseek_v3", **LATENT, q_lora_rank=None, n_group=1, topk_group=1,
        first_k_dense_replace=1, rope_interleave=False, rope_theta=5e4,
        scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, aux_loss_alpha=0.001,
        ep_size=1, seq_aux=True),
}
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 24))


@pytest.fixture(scope="module")
def torch():
  return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def made(torch, tmp_path_factory):
  """make(name) -> (transformers' model, the directory that it was saved to), made once."""
  import transformers

  @functools.cache
  def make(name):
    directory = tmp_path_factory.mktemp(name)
    config = {**SMALL, **CASES[name], "architectures": [
        families.ARCHITECTURES[CASES[name]["model_type"]]]}
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(directory), dtype=torch.float32,
        attn_implementation="eager").eval()
    with torch.no_grad():
      for tensor in model.state_dict().values():
        if tensor.ndim == 1 and tensor.is_floating_point():  # norms, biases: not all one or zero
          tensor.add_(0.2 * torch.randn_like(tensor))
    model.save_pretrained(directory)
    saved = json.loads((directory / "config.json").read_text())
    # As published: the family's own words, and what transformers wrote where they are silent.
    (directory / "config.json").write_text(json.dumps({**saved, **config}))
    if "rope_scaling" in config:
      edit(directory, rope_parameters=None)
    return model, directory
  return make


def edit(directory, **changes):
  path = directory / "config.json"
  path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@functools.partial(jax.jit, static_argnums=(1, 3))
def logits(params, cfg, tokens, how=transformer.PLAIN):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  x = transformer.forward(params, cfg, tokens, positions, jnp.ones_like(tokens), how)
  return transformer.logits(params, x, how)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_scanned_or_unrolled(name, made, torch):
  model, directory = made(name)
  params, cfg = hf.load(directory)
  with torch.no_grad():
    theirs = model(torch.asarray(TOKENS)).logits.numpy()
  assert np.std(theirs) > 0.1
  np.testing.assert_allclose(logits(params, cfg, TOKENS), theirs, atol=1e-4, rtol=0)
  np.testing.assert_allclose(logits(params, cfg, TOKENS, Execution(scan=True)), theirs,
                             atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_reinforce_loss_equal_transformers(name, made, torch):
  model, directory = made(name)
  params, cfg = hf.load(directory)
  rng = np.random.default_rng(2)
  row, before = np.asarray([0, 0, 1, 1, 1], np.int32), np.asarray([3, 20, 9, 10, 22], np.int32)
  advantage = rng.normal(size=5).astype(np.float32)
  target = TOKENS[row, before + 1]

  model.zero_grad()
  log_p = torch.log_softmax(model(torch.asarray(TOKENS)).logits, -1)
  (-(torch.asarray(advantage) * log_p[row, before, target]).sum() / 2).backward()
  theirs = on_disk(model, {n: p.grad.numpy() for n, p in model.named_parameters()
                           if p.grad is not None})

  one = lambda a: a[None]
  rows = loss.Rows(TOKENS, np.broadcast_to(np.arange(24), (2, 24)), np.ones((2, 24), np.int32),
                   one(row), one(before), one(target), one(advantage), np.full((1, 5), 0.5),
                   np.full((1, 5), np.nan))
  grads = jax.jit(jax.grad(loss.reinforce, has_aux=True), static_argnums=1)(params, cfg, rows)[0]
  ours = hf.to_tensors(grads, cfg)
  bias = [n for n in ours if n.endswith("e_score_correction_bias")]
  assert all(not ours.pop(n).any() for n in bias)  # it only chooses; no gradient reaches it
  assert ours.keys() == theirs.keys()
  for n, g in theirs.items():
    np.testing.assert_allclose(ours[n], g, atol=1e-3 * np.abs(g).max(), rtol=0, err_msg=n)


def on_disk(model, tensors):
  """transformers' parameters in memory (experts fused) -> as in a checkpoint."""
  out = {}
  for name, x in tensors.items():
    stem, _, last = name.rpartition(".")
    if not stem.endswith(".experts"):
      out[name] = x
      continue
    for e in range(len(x)):
      parts = np.split(x[e], 2) if last == "gate_up_proj" else [x[e]]
      for part, y in zip(last.removesuffix("_proj").split("_"), parts):
        out[f"{stem}.{e}.{part}_proj.weight"] = y
  return out


@pytest.mark.parametrize("name", CASES)
def test_weights_and_config_go_there_and_back(name, made, torch, tokenizer_dir, tmp_path):
  import transformers
  model, directory = made(name)
  params, cfg = hf.load(directory)
  assert families.from_hf(families.to_hf(cfg)) == cfg
  hf.export(params, cfg, tokenizer_dir, tmp_path / "out")
  there = safetensors.numpy.load_file(directory / "model.safetensors")
  back = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
  assert there.keys() == back.keys()
  assert all(there[k].tobytes() == back[k].tobytes() for k in there)
  again, report = transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path / "out", dtype=torch.float32, attn_implementation="eager",
      output_loading_info=True, local_files_only=True)
  assert type(again) is type(model)
  assert not report["missing_keys"] and not report["unexpected_keys"]
  with torch.no_grad():
    torch.testing.assert_close(again(torch.asarray(TOKENS)).logits,
                               model(torch.asarray(TOKENS)).logits, atol=1e-6, rtol=0)
  again.save_pretrained(tmp_path / "theirs")
  assert hf.read_config(tmp_path / "theirs") == cfg


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "qwen3-moe", "deepseek-v3"])
def test_cached_decoding_equals_the_full_forward_pass(name, made):
  params, cfg = hf.load(made(name)[1])
  seq = TOKENS[:1].astype(np.int32)
  zero = np.zeros(1, np.int32)
  cache = decode.init_cache(cfg, 2, 32)
  cache = decode.prefill(params, cache, seq[:, :8], zero, zero, cfg=cfg, span=16)
  cache = decode.prefill(params, cache, seq[:, 8:16], zero, zero + 8, cfg=cfg, span=16)
  rows = decode.Rows(zero, seq[:, 16], zero + 16, np.zeros((1, 2), np.uint32),
                     np.ones(1, np.float32), np.ones(1, np.float32),
                     np.full(1, cfg.vocab, np.int32), np.zeros(1, np.float32))
  tokens, log_probs, *_ = decode.decode(params, cache, decode.init_cache(cfg, 1, 16), rows,
                                        cfg=cfg, span=16, steps=4, truncate=False)
  whole = np.concatenate([seq[:, :17], tokens, seq[:, 21:]], 1).repeat(2, 0)  # compiled already
  want = jax.nn.log_softmax(logits(params, cfg, whole), -1)[0, 16:20]
  np.testing.assert_allclose(log_probs[0], np.asarray(want)[np.arange(4), tokens[0]], atol=2e-5)


def test_the_nnx_module_is_the_functions_over_its_state():
  cfg = families.from_hf({**SMALL, **CASES["llama-linear"]})
  params = transformer.init(cfg, 3)
  model = transformer.Transformer(cfg, params)
  np.testing.assert_allclose(model(TOKENS[:1]), logits(params, cfg, TOKENS[:1]), atol=1e-5)
  state = nnx.to_pure_dict(nnx.state(model))["params"]
  jax.tree.map(np.testing.assert_array_equal, state, params)


# What the published config.json of Kimi-K2 says, but for its quantisation, and Moonlight's.
KIMI_K2 = dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="kimi_k2", attention_bias=False,
    attention_dropout=0.0, aux_loss_alpha=0.001, bos_token_id=163584, eos_token_id=163585,
    ep_size=1, first_k_dense_replace=1, hidden_act="silu", hidden_size=7168,
    intermediate_size=18432, kv_lora_rank=512, max_position_embeddings=131072,
    moe_intermediate_size=2048, moe_layer_freq=1, n_group=1, n_routed_experts=384,
    n_shared_experts=1, norm_topk_prob=True, num_attention_heads=64, num_experts_per_tok=8,
    num_hidden_layers=61, num_key_value_heads=64, num_nextn_predict_layers=0, q_lora_rank=1536,
    qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-6, rope_theta=50000.0,
    rope_scaling=dict(beta_fast=1.0, beta_slow=1.0, factor=32.0, mscale=1.0, mscale_all_dim=1.0,
                      original_max_position_embeddings=4096, type="yarn"),
    routed_scaling_factor=2.827, scoring_func="sigmoid", seq_aux=True, tie_word_embeddings=False,
    topk_group=1, topk_method="noaux_tc", torch_dtype="bfloat16", use_cache=True, v_head_dim=128,
    vocab_size=163840)
MOONLIGHT = {**KIMI_K2, **dict(
    model_type="deepseek_v3", hidden_size=2048, intermediate_size=11264,
    max_position_embeddings=8192, moe_intermediate_size=1408, n_routed_experts=64,
    n_shared_experts=2, num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27,
    num_key_value_heads=16, q_lora_rank=None, rms_norm_eps=1e-5, rope_scaling=None,
    routed_scaling_factor=2.446)}


def test_kimi_k2_is_read_and_leaves_as_deepseek_v3():
  cfg = families.from_hf(KIMI_K2)
  assert cfg.moe.layers == tuple(range(1, 61)) and cfg.moe.active == 8
  assert (cfg.mla.q_rank, cfg.mla.kv_rank, cfg.key_dim, cfg.value_dim) == (1536, 512, 192, 128)
  # mscale / mscale_all_dim = 1; 0.1 ln 32 + 1 = 1.3465736, squared 1.8132604, / sqrt(192).
  assert cfg.rope_scaling.scale == 1.0
  assert cfg.query_scale == pytest.approx(1.8132604 / 192 ** 0.5, rel=1e-6)
  sizes = jax.tree.leaves(transformer.shapes(cfg), is_leaf=lambda s: isinstance(s, tuple))
  assert sum(np.prod(s, dtype=np.int64) for s in sizes) == pytest.approx(1.0264e12, rel=1e-3)
  out = families.to_hf(cfg)
  assert out["model_type"] == "deepseek_v3" and families.from_hf(out) == cfg


def test_moonlight_has_16_billion_parameters():
  cfg = families.from_hf(MOONLIGHT)
  sizes = jax.tree.leaves(transformer.shapes(cfg), is_leaf=lambda s: isinstance(s, tuple))
  assert sum(np.prod(s, dtype=np.int64) for s in sizes) == pytest.approx(15.96e9, rel=2e-3)


@pytest.mark.parametrize("base, changes, says", [
    (KIMI_K2, {"model_type": "mamba2"}, "model_type 'mamba2' is not supported"),
    (KIMI_K2, {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    (KIMI_K2, {"topk_method": "greedy"}, "topk_method='greedy'"),
    (KIMI_K2, {"num_key_value_heads": 8}, "num_key_value_heads=8"),
    (KIMI_K2, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    (KIMI_K2, {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    (KIMI_K2, {"sliding_window": 4096}, "sliding_window=4096 is not supported"),
    (KIMI_K2, {"rope_scaling": {"type": "yarn", "factor": 2, "twist": 1}}, "twist=1"),
    (KIMI_K2, {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2}}, "contradict"),
    (SMALL, {"model_type": "llama", "sliding_window": 8}, "sliding_window=8"),
    (SMALL, {"model_type": "qwen2", "attention_bias": False}, "attention_bias=False"),
    (SMALL, {"model_type": "qwen2", "head_dim": 7}, "must be even"),
    (SMALL, {"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
])
def test_what_kr_does_not_compute_is_refused_by_name(base, changes, says):
  with pytest.raises(ValueError, match=says):
    families.from_hf({**base, **changes})


def test_a_window_without_its_length_is_missing_it_and_is_not_the_whole_context():
  with pytest.raises(KeyError, match="sliding_window"):
    families.from_hf({**SMALL, "model_type": "qwen2", "use_sliding_window": True})


@pytest.mark.parametrize("changes", [
    {"qk_norm": True}, {"window": 4, "window_layers": (0,)}, {"attention_scale": 0.5},
    {"out_bias": True}])
def test_a_model_that_its_family_cannot_express_is_not_exported(changes):
  cfg = dataclasses.replace(families.from_hf({**SMALL, "model_type": "llama"}), **changes)
  with pytest.raises(ValueError, match="a llama cannot have"):
    families.to_hf(cfg)
