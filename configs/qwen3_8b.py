"""Qwen3-8B learns to research an offline web: a dense policy, contexts of 32,768 tokens.

Command:   python -m kr.train --config=configs/qwen3_8b.py --workdir=runs/qwen3_8b
           (after: hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B)
Hardware:  256 TPU v5e chips, one pod.
Time:      not yet run: the loop of kr.train does not span several hosts yet.
Score:     not yet run.

Rows are as long as the context that the model was trained with; tokens of a row are split over
four chips, which gather keys and values; two share the head and the heads.
What it needs, by `python -m kr.train --config=configs/qwen3_8b.py --plan --chip=v5e`:

    8,191 M parameters, 7,568 M of them multiply a token; fsdp=32,context=4,tensor=2: 256 x v5e
    a step at most: 512 rows of 32768 tokens, 32 at a time, 78% of them trained
    bfloat16, remat block; compiled for CPU devices, whose attention is blockwise

    memory of a device           GiB
      parameters                0.48
      gradients                 0.48
      optimizer                 0.96
      rows                      0.00
      temporaries               7.77
      together                  9.68  of 14.90: fits, 5.22 left
      largest temporaries: 2.25 bf16[36,1,8192,4096]; 1.16 f32[75968,4096]; 1.16 f32[4096,75968]

    a step on a device
      by formula    6.37e+15 FLOPs (without recomputation 4.82e+15), 1.49e+03 GB moved
      as compiled   3.64e+15 FLOPs, 3.97e+03 GB moved, in matrix products, 3 loops counted once

      received, GB          all-gather  reduce-scatter  all-reduce  all-to-all  permute   seconds
      fsdp                       449.2           369.7     0.03822                           4.09
      tensor                                                 623.6                           3.12
      context                     58.1           28.99       46.85                           0.67

    bound on v5e: compute 32.3 s, memory 1.82 s, network 7.88 s
      at least 32.3 s a step, compute-bound
      at most 519,179 tokens/s, 2,028 a chip: 76% model FLOPs utilisation

`--config=configs/qwen3_8b.py:tiny` is the same run with the quick start's little policy on two
cores, for tests.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config; `arg` is empty or "tiny"."""
  if arg not in ("", "tiny"):
    raise ValueError(f"configs/qwen3_8b.py has the forms '' and ':tiny', not {arg!r}")
  c = ml_collections.ConfigDict()
  c.seed = 0

  c.world = dict(dir="", seed=0, countries=250, cities=5700, elements=118)
  c.tasks = dict(
      seed=0, train=12000, heldout=400,
      mix=dict(onehop=0.1, twohop=0.3, threehop=0.3, comparison=0.15, arithmetic=0.15))

  # The starting policy: the directory that the command above downloads to. `model` is its
  # config.json as far as it shapes the model, for --plan where the directory is not at hand.
  c.start = dict(dir="models/Qwen3-8B", rebuild=False)
  c.model = dict(
      model_type="qwen3", vocab_size=151936, hidden_size=4096, num_hidden_layers=36,
      num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=12288,
      rope_theta=1000000.0, rms_norm_eps=1e-06, tie_word_embeddings=False,
      max_position_embeddings=40960, hidden_act="silu", attention_bias=False)

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
      mesh="fsdp=32,context=4,tensor=2", precision="bfloat16", remat="block", scan=True,
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
