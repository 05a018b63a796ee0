"""Qwen3-30B-A3B learns to research an offline web: 128 experts, contexts of 32,768 tokens.

Command:   python -m kr.train --config=configs/qwen3_30b_a3b.py --workdir=runs/qwen3_30b_a3b
           (after: hf download Qwen/Qwen3-30B-A3B --local-dir models/Qwen3-30B-A3B)
Hardware:  128 TPU v5p chips.
Time:      not yet run: the loop of kr.train does not span several hosts yet.
Score:     not yet run.

The experts are spread over 8 chips, each of which computes its 16 for the rows of all 8.
What it needs, by `python -m kr.train --config=configs/qwen3_30b_a3b.py --plan --chip=v5p`:

    30,532 M parameters, 3,042 M of them multiply a token; fsdp=4,expert=8,context=4: 128 x v5p
    a step at most: 512 rows of 32768 tokens, 32 at a time, 78% of them trained
    bfloat16, remat block; compiled for CPU devices, whose attention is blockwise

    memory of a device           GiB
      parameters                4.85
      gradients                 4.85
      optimizer                 9.69
      rows                      0.00
      temporaries              29.36
      together                 48.75  of 88.48: fits, 39.73 left
      largest temporaries: 4.00 f32[524288,2048]; 4.00 f32[524288,1,2048]; 2.00 bf16[524288,2048]

    a step on a device
      by formula    9.81e+15 FLOPs (without recomputation 7.41e+15), 5.13e+03 GB moved
      as compiled   1.64e+16 FLOPs, 5e+04 GB moved, in matrix products, 3 loops counted once

      received, GB          all-gather  reduce-scatter  all-reduce  all-to-all  permute   seconds
      expert                     546.8           362.2     4.2e-08                           1.51
      fsdp                       532.6             322    1.08e-07                           1.42
      fsdp+expert+context        818.2                       1.598                           1.37
      context                    77.46           38.65       116.9                          0.388
      expert+context                                         95.61                          0.159
      fsdp+expert                                19.29     0.02616                         0.0322

    bound on v5p: compute 21.4 s, memory 1.86 s, network 4.89 s
      at least 21.4 s a step, compute-bound
      at most 785,012 tokens/s, 6,133 a chip: 75% model FLOPs utilisation

`--config=configs/qwen3_30b_a3b.py:tiny` is the same run with the quick start's little policy on two
cores, for tests.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config; `arg` is empty or "tiny"."""
  if arg not in ("", "tiny"):
    raise ValueError(f"configs/qwen3_30b_a3b.py has the forms '' and ':tiny', not {arg!r}")
  c = ml_collections.ConfigDict()
  c.seed = 0

  c.world = dict(dir="", seed=0, countries=250, cities=5700, elements=118)
  c.tasks = dict(
      seed=0, train=12000, heldout=400,
      mix=dict(onehop=0.1, twohop=0.3, threehop=0.3, comparison=0.15, arithmetic=0.15))

  # The starting policy: the directory that the command above downloads to. `model` is its
  # config.json as far as it shapes the model, for --plan where the directory is not at hand.
  c.start = dict(dir="models/Qwen3-30B-A3B", rebuild=False)
  c.model = dict(
      model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, num_hidden_layers=48,
      num_attention_heads=32, num_key_value_heads=4, head_dim=128, intermediate_size=6144,
      moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
      norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=(), rope_theta=1000000.0,
      rms_norm_eps=1e-06, tie_word_embeddings=False, max_position_embeddings=40960,
      hidden_act="silu", attention_bias=False)

  c.agent = dict(
      system="Research the question with the tools, then answer.", declare="json",
      max_turns=50, max_context_tokens=32768, max_turn_tokens=512, max_calls=4)
  c.tools = dict(top_k=5, snippet_words=24, lines=40, max_chars=4000, python_wall_s=10.0)
  # kind: kr, the server in JAX, or sglang (bash launch/sglang.sh --install).
  c.server = dict(kind="kr", count=1, urls=(), mesh="", slots=64, max_len=32768,
                  start_timeout_s=1800.0, max_restarts=3)
  # As in configs/quickstart.py.
  c.rollout = dict(
    concurrency=256, max_staleness=0, budget_s=0.0, enough=1.0, max_pauses=4,
    turn_s=0.0, tool_s=0.0, trajectory_s=0.0, grace_s=30.0)

  # More steps to save than in the quick start, so each weighs less: 0.98^50 = 0.36.
  c.rl = dict(
      steps=200, tasks_per_step=64, group_size=8,
      gamma=0.98, format_penalty=0.2, negatives_keep=0.5, protect_faults=True,
      learning_rate=1e-6, b2=0.99, warmup_steps=10, clip_norm=1.0, weight_decay=0.0,
      row_tokens=32768, micro_rows=32, row_buckets=3, share_prefix=False,
      max_logprob_gap=0.05, keep_checkpoints=2, off_policy="strict", ratio_cap=2.0)
  c.learner = dict(
      mesh="fsdp=4,expert=8,context=4", precision="bfloat16", remat="block", scan=True,
      attention="auto", head_chunk=1024, optimizer="adamw", schedule="constant", lora_rank=0,
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
