"""A real small language model learns to use tools: SmolLM2-135M-Instruct on an offline web.

The first prompt shows three worked examples and three first calls, recorded with the real tools on
training tasks. Tasks are one-hop look-ups: search, open, answer.

Command:   bash launch/smollm2.sh
           python -m kr.train --config=configs/smollm2.py --workdir=runs/smollm2
Hardware:  two CPU cores, 16 GiB of memory, 10 GiB of disk, no GPU.
Time:      not yet run to its end. A step of 24 trajectories (20,000 tokens) took 13 s to roll
           out, 19 s to update and 2 s to publish.
Score:     not yet run to its end. Before training, of 104 samples (26 training tasks, temperature
           1, python not among the tools) the first turn is a valid call in 0 % without examples,
           in 0 % with one, in 69 % with three and three first calls, where 5 % end with the right
           answer; with three alone in 49 % of 128. The prompt was chosen on some of these tasks.

`--config=configs/smollm2.py:tiny` takes two small steps through every stage, for tests.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config; `arg` is empty or "tiny"."""
  if arg not in ("", "tiny"):
    raise ValueError(f"configs/smollm2.py has the forms '' and ':tiny', not {arg!r}")
  c = ml_collections.ConfigDict()
  c.seed = 0

  c.world = dict(dir="", seed=0, countries=250, cities=5700, elements=118)
  c.tasks = dict(seed=0, train=4000, heldout=400, mix=dict(onehop=1.0))

  # Weights and tokenizer as a Hugging Face directory; `command` makes it.
  c.start = dict(dir="starts/smollm2", rebuild=False, command="bash launch/smollm2.sh")

  # Turns and results are short, for two cores. What all prompts begin with is computed once a row.
  # examples: worked ones in the first prompt, 200 tokens each; openings: first calls only, 45 each.
  c.agent = dict(
    system="Research the question with the tools, then answer.",
    declare="brief",
    examples=3,
    openings=3,
    max_turns=5,
    max_context_tokens=1024,
    max_turn_tokens=64,
    max_calls=1,
  )
  c.tools = dict(top_k=1, snippet_words=4, lines=7, max_chars=600, python_wall_s=5.0)
  # kind: kr, the server in JAX, or sglang (bash launch/sglang.sh --install).
  c.server = dict(kind="kr", count=1, urls=(), mesh="", slots=16, max_len=1024,
                  start_timeout_s=300.0, max_restarts=3)
  # As in configs/quickstart.py.
  c.rollout = dict(
    concurrency=16, max_staleness=0, budget_s=0.0, enough=1.0, max_pauses=4,
    turn_s=0.0, tool_s=0.0, trajectory_s=0.0, grace_s=30.0)

  c.rl = dict(
    steps=200, tasks_per_step=4, group_size=6,
    gamma=0.95, format_penalty=0.2, negatives_keep=0.5, protect_faults=True,
    learning_rate=1e-5, b2=0.99, warmup_steps=5, clip_norm=1.0, weight_decay=0.0,
    row_tokens=4096, micro_rows=1, row_buckets=1, share_prefix=True,
    max_logprob_gap=1e-3, keep_checkpoints=2, off_policy="strict", ratio_cap=2.0,
  )
  # As in configs/quickstart.py. Float32: the server samples in it, and the two must agree.
  c.learner = dict(
    mesh="", precision="float32", remat="none", scan=False, attention="auto", head_chunk=256,
    optimizer="adamw", schedule="constant", lora_rank=0, lora_alpha=32.0, lora_targets=(),
  )
  c.eval = dict(tasks=100, samples=2, concurrency=16)

  if arg == "tiny":
    c.world.update(countries=24, cities=240, elements=40)
    c.tasks.update(train=120, heldout=20)
    c.agent.update(max_turns=3, max_turn_tokens=40, max_context_tokens=896)
    c.server.update(slots=4, max_len=896)
    c.rollout.update(concurrency=4)
    c.rl.update(steps=2, tasks_per_step=2, group_size=2, row_tokens=1792)
    c.eval.update(tasks=2, samples=1, concurrency=4)
  return c
