"""A policy learns to research an offline web, from one command, on a laptop.

Command:   bash launch/quickstart.sh
           (python -m kr.train --config=configs/quickstart.py --workdir=runs/quickstart)
Hardware:  two CPU cores, 3 GiB of memory, no GPU, no network.
Time:      about 10 minutes with the installation; `:tiny` passes every stage in under 2.
Score:     see README.md for the table over three seeds.

`--config=configs/quickstart.py:tiny` is the same run in miniature, for tests.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config; `arg` is empty or "tiny"."""
  if arg not in ("", "tiny"):
    raise ValueError(f"configs/quickstart.py has the forms '' and ':tiny', not {arg!r}")
  c = ml_collections.ConfigDict()
  c.seed = 0

  # The offline web. Its seed is apart from the run's: runs of other seeds share one world.
  c.world = dict(dir="", seed=0, countries=250, cities=5700, elements=118)
  c.tasks = dict(
    seed=0,
    train=12000,
    heldout=400,
    mix=dict(onehop=0.45, twohop=0.25, threehop=0.1, comparison=0.1, arithmetic=0.1),
  )

  # The starting policy. It ships with the repository; rebuild=True makes it again.
  c.start = dict(
    dir="starts/quickstart",
    rebuild=False,
    seed=0,
    vocab=768,
    width=192,
    layers=4,
    heads=3,
    head_dim=64,
    mlp=640,
    rope_theta=1e6,
    demonstrations=12000,
    steps=500,
    trajectories_per_step=32,
    learning_rate=2e-3,
  )

  c.agent = dict(
    system="Research the question with the tools, then answer.",
    declare="brief",
    max_turns=8,
    max_context_tokens=768,
    max_turn_tokens=80,
    max_calls=2,
  )
  c.tools = dict(top_k=2, snippet_words=8, lines=7, max_chars=600, python_wall_s=5.0)
  # kind: kr, the server in JAX; sglang, or sglang_jax for TPU (launch/sglang.sh, sglang_jax.sh); or
  # colocated, kr's engine in the trainer, on devices of its own (mesh) or in turn with the learner.
  # count: servers to start; or urls of servers that run.
  c.server = dict(kind="kr", count=1, urls=(), mesh="", slots=64, max_len=768,
                  start_timeout_s=120.0, max_restarts=3)
  # Acting may run ahead by max_staleness policies; 0: strictly on-policy. A step ends early after
  # budget_s seconds (0: no budget) or with a share `enough` of its groups; what is unfinished then
  # goes on first in the next one, max_pauses times at most. In seconds, 0 for none: turn_s and
  # tool_s of a turn and of a call, trajectory_s of all of them. grace_s: what SIGTERM leaves.
  c.rollout = dict(
    concurrency=64, max_staleness=0, budget_s=0.0, enough=1.0, max_pauses=4,
    turn_s=0.0, tool_s=0.0, trajectory_s=0.0, grace_s=30.0)

  # off_policy: what becomes of tokens that an older policy sampled, which asynchrony and early ends
  # bring: strict (an error), mask, tis (its ratios up to ratio_cap), topr or keep.
  c.rl = dict(
      steps=50, tasks_per_step=16, group_size=4,
      gamma=0.9, format_penalty=0.2, negatives_keep=0.3, protect_faults=True,
      learning_rate=2.5e-4, b2=0.99, warmup_steps=5, clip_norm=10.0, weight_decay=0.0,
      row_tokens=768, micro_rows=4, row_buckets=1, share_prefix=False,
      max_logprob_gap=1e-3, keep_checkpoints=2, off_policy="strict", ratio_cap=2.0)

  # How the update is computed. mesh: such as "fsdp=4,tensor=2", empty for one device.
  # precision: float32, mixed or bfloat16. remat: none, dots, block or offload. optimizer: adamw
  # or muon. schedule: constant, cosine, linear or wsd, over rl.steps; where these are raised to
  # extend a run, it goes on along the longer schedule. lora_rank: 0 trains all.
  c.learner = dict(
      mesh="", precision="float32", remat="none", scan=False, attention="auto", head_chunk=1024,
      optimizer="adamw", schedule="constant", lora_rank=0, lora_alpha=32.0, lora_targets=())
  c.eval = dict(tasks=200, samples=4, concurrency=64)

  if arg == "tiny":
    c.world.update(countries=24, cities=240, elements=40)
    c.tasks.update(train=200, heldout=40)
    c.rl.update(steps=3, tasks_per_step=4, group_size=4)
    c.eval.update(tasks=8, samples=4)
  return c
