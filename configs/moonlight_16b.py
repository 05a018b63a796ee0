"""Moonlight-16B-A3B, of the Kimi family, learns to research an offline web.

Command:   python -m kr.train --config=configs/moonlight_16b.py --workdir=runs/moonlight_16b
           (after: hf download moonshotai/Moonlight-16B-A3B-Instruct --local-dir
           models/Moonlight-16B-A3B-Instruct)
Hardware:  32 TPU v5p chips.
Time:      not yet run: the loop of kr.train does not span several hosts yet, and the model's
           tokenizer comes as tiktoken's file, where kr wants a tokenizer.json.
Score:     not yet run.

Latent attention, 64 routed and 2 shared experts, and Muon, with which the model was made. Its
context is 8,192 tokens, and so are the rows.
What it needs, by `python -m kr.train --config=configs/moonlight_16b.py --plan --chip=v5p`:

    15,960 M parameters, 2,579 M of them multiply a token; fsdp=8,expert=4: 32 x v5p
    a step at most: 512 rows of 8192 tokens, 32 at a time, 78% of them trained
    bfloat16, remat block; compiled for CPU devices, whose attention is blockwise

    memory of a device           GiB
      parameters                2.60
      gradients                 2.60
      optimizer                 2.93
      rows                      0.00
      temporaries              48.89
      together                 57.01  of 88.48: fits, 31.46 left
      largest temporaries: 1.50 f32[196608,2048]; 1.50 f32[196608,1,2048]; 1.25 f32[2048,163840]

    a step on a device
      by formula    3.15e+15 FLOPs (without recomputation 2.42e+15), 3.38e+03 GB moved
      as compiled    6.8e+15 FLOPs, 1.43e+04 GB moved, in matrix products, 6 loops counted once

      received, GB          all-gather  reduce-scatter  all-reduce  all-to-all  permute   seconds
      fsdp                       650.6           379.8       350.7                            2.3
      expert                       132              84       38.19                          0.424
      fsdp+expert                54.09            20.8        7.46                          0.137

    bound on v5p: compute 6.87 s, memory 1.22 s, network 2.86 s
      at least 6.87 s a step, compute-bound
      at most 610,697 tokens/s, 19,084 a chip: 77% model FLOPs utilisation

`--config=configs/moonlight_16b.py:tiny` is the same run with the quick start's little policy on two
cores, for tests.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config; `arg` is empty or "tiny"."""
  if arg not in ("", "tiny"):
    raise ValueError(f"configs/moonlight_16b.py has the forms '' and ':tiny', not {arg!r}")
  c = ml_collections.ConfigDict()
  c.seed = 0

  c.world = dict(dir="", seed=0, countries=250, cities=5700, elements=118)
  c.tasks = dict(
      seed=0, train=12000, heldout=400,
      mix=dict(onehop=0.1, twohop=0.3, threehop=0.3, comparison=0.15, arithmetic=0.15))

  # The starting policy: the directory that the command above downloads to. `model` is its
  # config.json as far as it shapes the model, for --plan where the directory is not at hand.
  c.start = dict(dir="models/Moonlight-16B-A3B-Instruct", rebuild=False)
  c.model = dict(
      model_type="deepseek_v3", vocab_size=163840, hidden_size=2048, num_hidden_layers=27,
      num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512,
      qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, intermediate_size=11264,
      moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2,
      num_experts_per_tok=6, n_group=1, topk_group=1, norm_topk_prob=True,
      scoring_func="sigmoid", topk_method="noaux_tc", routed_scaling_factor=2.446,
      first_k_dense_replace=1, moe_layer_freq=1, rope_theta=50000.0, rms_norm_eps=1e-05,
      tie_word_embeddings=False, max_position_embeddings=8192, hidden_act="silu",
      attention_bias=False)

  c.agent = dict(
      system="Research the question with the tools, then answer.", declare="json",
      max_turns=20, max_context_tokens=8192, max_turn_tokens=320, max_calls=4)
  c.tools = dict(top_k=4, snippet_words=24, lines=24, max_chars=2000, python_wall_s=10.0)
  # kind: kr, the server in JAX, or sglang (bash launch/sglang.sh --install).
  c.server = dict(kind="kr", count=1, urls=(), mesh="", slots=64, max_len=8192,
                  start_timeout_s=1800.0, max_restarts=3)
  # As in configs/quickstart.py.
  c.rollout = dict(
    concurrency=256, max_staleness=0, budget_s=0.0, enough=1.0, max_pauses=4,
    turn_s=0.0, tool_s=0.0, trajectory_s=0.0, grace_s=30.0)

  # More steps to save than in the quick start, so each weighs less: 0.95^20 = 0.36.
  c.rl = dict(
      steps=200, tasks_per_step=64, group_size=8,
      gamma=0.95, format_penalty=0.2, negatives_keep=0.5, protect_faults=True,
      learning_rate=1e-6, b2=0.99, warmup_steps=10, clip_norm=1.0, weight_decay=0.0,
      row_tokens=8192, micro_rows=32, row_buckets=3, share_prefix=False,
      max_logprob_gap=0.05, keep_checkpoints=2, off_policy="strict", ratio_cap=2.0)
  c.learner = dict(
      mesh="fsdp=8,expert=4", precision="bfloat16", remat="block", scan=True,
      attention="auto", head_chunk=1024, optimizer="muon", schedule="constant", lora_rank=0,
      lora_alpha=32.0, lora_targets=())
  c.eval = dict(tasks=400, samples=4, concurrency=256)

  if arg == "tiny":
    c.world.update(countries=24, cities=240, elements=40)
    c.tasks.update(train=200, heldout=40)
    c.start.dir = "starts/quickstart"
    c.agent.update(declare="brief", max_turns=8, max_context_tokens=768, max_turn_tokens=80,
                   max_calls=2)
    c.tools.update(top_k=2, snippet_words=8, lines=7, max_chars=600, python_wall_s=5.0)
    c.server.update(max_len=768, start_timeout_s=120.0)
    c.rollout.concurrency = 64
    c.rl.update(steps=2, tasks_per_step=4, group_size=4, row_tokens=768, micro_rows=4,
                row_buckets=1, max_logprob_gap=1e-3)
    c.learner.update(mesh="", precision="float32")
    c.eval.update(tasks=8, samples=4, concurrency=64)
  return c
