"""The shape of a policy, in frozen records: what changes a model's result, and how it is run.

`kr.model.families` reads and writes Hugging Face's config.json.
"""

from __future__ import annotations

import dataclasses

# Segment ids of packed rows: 0 is padding, and what every later token of the row sees is SHARED.
SHARED = 2**30


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How rotary frequencies are stretched beyond the trained length; see `kr.model.rope`.

  kind: linear, llama3 or yarn. `scale`: what cosine and sine are multiplied by (yarn);
  mscale, mscale_all_dim: what DeepSeek's config.json says of it, so that export says it too.
  """

  kind: str
  factor: float
  original_max_len: int = 0
  low_freq_factor: float = 1.0  # llama3
  high_freq_factor: float = 4.0  # llama3
  beta_fast: float = 32.0  # yarn
  beta_slow: float = 1.0  # yarn
  truncate: bool = True  # yarn
  scale: float = 1.0  # yarn
  mscale: float = 0.0  # yarn
  mscale_all_dim: float = 0.0  # yarn


@dataclasses.dataclass(frozen=True)
class MoeConfig:
  """A mixture of E experts, of which each token visits `active`; see `kr.model.moe`.

  score: softmax (Qwen3-MoE) or sigmoid with a selection bias and groups (DeepSeek-V3).
  layers: the indices of the layers that are mixtures; the others have a dense MLP.
  """

  experts: int
  active: int
  mlp: int
  layers: tuple[int, ...]
  score: str = "softmax"
  normalise: bool = True
  groups: int = 1
  active_groups: int = 1
  scaling: float = 1.0
  shared: int = 0  # experts that every token visits

  def __post_init__(self):
    object.__setattr__(self, "layers", tuple(self.layers))
    if self.score not in ("softmax", "sigmoid"):
      raise ValueError(f"score {self.score!r} is neither softmax nor sigmoid")
    if self.experts % self.groups or not 1 <= self.active <= self.experts:
      raise ValueError(f"{self.experts} experts cannot have {self.groups} groups and "
                       f"{self.active} active")


@dataclasses.dataclass(frozen=True)
class MlaConfig:
  """Multi-head latent attention (DeepSeek-V2): keys and values from a narrow latent.

  q_rank: width of the query's latent, 0 for none. kv_rank: width of the keys' and values'.
  A head's query and key have `nope` dimensions without and `rope` with rotary positions; its
  value has `value`. interleaved: rotary dimension 2i is paired with 2i+1 in the checkpoint.
  """

  q_rank: int
  kv_rank: int
  nope: int
  rope: int
  value: int
  interleaved: bool = True


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder: RMSNorm, rotary positions, grouped heads or latent attention, SwiGLU or experts.

  vocab (V), width (D), layers (L), heads (H), kv_heads (K), head_dim (h), mlp (F).
  `tied`: the output head is the embedding. `max_len`: longest sequence in tokens.
  `window`: tokens that the layers in `window_layers` look back, themselves included; 0: all.
  `family`: Hugging Face's model_type, which is how the model is exported.
  """

  vocab: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp: int
  rope_theta: float = 1e4
  norm_eps: float = 1e-6
  tied: bool = True
  max_len: int = 2048
  family: str = "qwen3"
  qk_norm: bool = True
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  window: int = 0
  window_layers: tuple[int, ...] = ()
  rope_scaling: RopeScaling | None = None
  moe: MoeConfig | None = None
  mla: MlaConfig | None = None
  attention_scale: float = 0.0  # what q·k is multiplied by; 0: key_dim ** -0.5

  def __post_init__(self):
    for name, kind in (("rope_scaling", RopeScaling), ("moe", MoeConfig), ("mla", MlaConfig)):
      if isinstance(value := getattr(self, name), dict):  # from a checkpoint's JSON
        object.__setattr__(self, name, kind(**value))
    object.__setattr__(self, "window_layers", tuple(self.window_layers))
    if self.heads % self.kv_heads:
      raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
    if self.rope_dim % 2:
      raise ValueError(f"head_dim ({self.rope_dim}) must be even: rotary positions turn pairs")

  @property
  def rope_dim(self) -> int:
    """Dimensions of a head that rotary positions turn."""
    return self.mla.rope if self.mla else self.head_dim

  @property
  def key_dim(self) -> int:
    """Dimensions of a head's query and key."""
    return self.mla.nope + self.mla.rope if self.mla else self.head_dim

  @property
  def value_dim(self) -> int:
    """Dimensions of a head's value."""
    return self.mla.value if self.mla else self.head_dim

  @property
  def query_scale(self) -> float:
    """What q·k is multiplied by before the softmax."""
    return self.attention_scale or self.key_dim ** -0.5

  def is_moe(self, layer: int) -> bool:
    """Whether the layer is a mixture of experts."""
    return self.moe is not None and layer in self.moe.layers

  def window_of(self, layer: int) -> int:
    """How many tokens the layer looks back, itself included; 0: all."""
    return self.window if layer in self.window_layers else 0


@dataclasses.dataclass(frozen=True)
class Execution:
  """How a model is run; changes speed and memory, and the result by rounding alone.

  precision: float32; mixed (matrix products in bfloat16, accumulated in float32, all else
    float32); bfloat16 (activations too; norms, softmax, loss and parameters stay float32).
  remat: what the backward pass finds stored of a layer: `none` recomputes nothing, `dots`
    keeps products with parameters (attention is computed again), `block` keeps the layer's
    input, `offload` keeps that in host memory.
  scan: one compiled layer for a run of equal layers, instead of one for each. Compiles fast,
    which is what deep models want; unrolled runs faster on CPU. (With jax 0.10, XLA on CPU
    undoes the recomputation of unrolled layers: there, scan to save memory.)
  attention: auto, or a name in `kr.model.attention`.
  head_chunk: trained tokens whose logits exist at a time.
  """

  precision: str = "float32"
  remat: str = "block"
  scan: bool = False
  attention: str = "auto"
  head_chunk: int = 1024

  def __post_init__(self):
    for name, known in (("precision", ("float32", "mixed", "bfloat16")),
                        ("remat", ("none", "dots", "block", "offload"))):
      if getattr(self, name) not in known:
        raise ValueError(f"{name}={getattr(self, name)!r} is none of {', '.join(known)}")
