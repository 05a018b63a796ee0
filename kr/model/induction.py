"""A starting point for policies trained from scratch: a transformer that can already copy.

Reading a page and answering from it is copying: find where the context says what was
asked, repeat what follows. Attention learns that circuit ("induction heads", Olsson et
al., 2022) only after tens of millions of tokens. `init` writes it into the weights of an
ordinary Qwen3-architecture decoder, so that a laptop can start where the interesting
part begins. The architecture is unchanged, and every weight stays trainable.

Layer 0, heads 0 and 1 look one and two tokens back and write what they see beside the
token itself. Layer 1, head 0 looks for the place whose two predecessors equal the two
latest tokens, head 1 for the one whose predecessor equals the latest token; both repeat
the token found there.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kr.model import transformer
from kr.model.config import ModelConfig

# Pairs of rotary dimensions that turn fast tell neighbours apart; those that turn by less
# than a radian over `_REACH_TOKENS` compare contents at any distance.
_FAST_PAIRS = 6
_REACH_TOKENS = 500
_SHARP_POSITION = 3.0  # gain of q and k: about ten nats between an offset and its neighbour
_SHARP_CONTENT = 1.7  # about 24 nats between a full match and none
_COPY_GAIN = 4.0  # of what is repeated, over the token that is there


def init(cfg: ModelConfig, seed: int = 0) -> transformer.Params:
  """Parameters of `cfg` with the copying circuit in layers 0 and 1.

  Raises ValueError if the shape has no room for it: at least 2 layers, 2 heads of its own
  (kv_heads == heads), tied embeddings, and width at least 3 · head_dim.
  """
  h, D, K = cfg.head_dim, cfg.width, cfg.kv_heads
  if cfg.layers < 2 or cfg.heads < 2 or K != cfg.heads or not cfg.tied or D < 3 * h:
    raise ValueError(
      "induction init needs layers >= 2, heads == kv_heads >= 2, tied embeddings, "
      "width >= 3 * head_dim"
    )
  rng = np.random.default_rng(seed)
  params = transformer.init(cfg, seed)
  p = {k: np.array(v) for k, v in params["layers"].items()}
  p["wo"] *= 0.1
  p["down"] *= 0.1

  # The residual stream: what the token is, what the one before was, and the one before that.
  here, back1, back2 = slice(0, h), slice(h, 2 * h), slice(2 * h, 3 * h - 1)
  constant = D - 1
  embed = 0.02 * rng.standard_normal((cfg.vocab, D)).astype(np.float32)
  embed[:, here] = rng.standard_normal((cfg.vocab, h)) * h**-0.5  # unit norm
  embed[:, constant] = 1.0

  half = h // 2
  theta = cfg.rope_theta ** (-np.arange(half) / half)
  # Layer 0: the query is a constant; the key is the same constant turned by the offset.
  p["q_norm"][0], p["k_norm"][0] = 1.0, 1.0
  for norm in ("q_norm", "k_norm"):
    p[norm][0, :_FAST_PAIRS] = p[norm][0, half : half + _FAST_PAIRS] = _SHARP_POSITION
  entering = D**0.5 / 2**0.5  # what the norm multiplies by: the token and the constant have norm 1
  for head, (offset, target) in enumerate(((1, back1), (2, back2))):
    for w in ("wq", "wk", "wv"):
      p[w][0, :, head] = 0.0
    p["wq"][0, constant, head, :_FAST_PAIRS] = 1.0
    p["wk"][0, constant, head, :_FAST_PAIRS] = np.cos(offset * theta[:_FAST_PAIRS])
    p["wk"][0, constant, head, half : half + _FAST_PAIRS] = np.sin(offset * theta[:_FAST_PAIRS])
    p["wv"][0, here, head] = np.eye(h) / entering
    p["wo"][0, head] = 0.0
    p["wo"][0, head, :, target] = np.eye(h)[:, : target.stop - target.start]

  # Layer 1: queries and keys are random projections of contents, on slow dimensions alone.
  slow = np.flatnonzero(theta * _REACH_TOKENS < 1.0)
  if slow.size < 4:
    raise ValueError(
      f"rope_theta={cfg.rope_theta} and head_dim={h} leave no slow dimensions to match on; "
      "raise them"
    )
  slow = np.concatenate([slow, slow + half])
  p["q_norm"][1], p["k_norm"][1] = 1.0, 1.0
  p["q_norm"][1, slow] = p["k_norm"][1, slow] = _SHARP_CONTENT
  entering = D**0.5 / 2.0  # token, its two predecessors, the constant
  for head, pairs in enumerate((((here, back1), (back1, back2)), ((here, back1),))):
    for w in ("wq", "wk", "wv"):
      p[w][1, :, head] = 0.0
    for query, key in pairs:
      match = rng.standard_normal((h, slow.size)).astype(np.float32)
      for w, where in (("wq", query), ("wk", key)):
        rows = np.arange(D)[where]
        p[w][1, rows[:, None], head, slow] = match[: rows.size]
    p["wv"][1, here, head] = np.eye(h) / entering
    p["wo"][1, head] = 0.0
    p["wo"][1, head, :, here] = np.eye(h) * _COPY_GAIN / 2
  params["layers"] = {k: jnp.asarray(v, jnp.float32) for k, v in p.items()}
  params["embed"] = jnp.asarray(embed)
  return params
