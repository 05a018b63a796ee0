"""Packs trajectories into rows of one width, or of a few. numpy only.

Segments of kept trajectories are laid end to end in rows of `row_tokens`, with segment
ids to keep their attention apart. What all of them begin with, such as a long system prompt, may
be laid once a row instead of once a segment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from kr import types
from kr.model.config import SHARED

# A trajectory, the advantage of each of its turns ([T]), and whether it trains.
Item = tuple[types.Trajectory, Sequence[float] | np.ndarray, bool]


@dataclasses.dataclass(frozen=True)
class Batch:
  """Packed rows; every array is [B, T], T = `row_tokens`, B a multiple of `rows_multiple`.

  tokens: int32, 0 in padding (never read an id to find padding: use segment_ids).
  positions: int32, from 0 in each segment (behind a shared prefix, from its length); 0 in padding.
  segment_ids: int32, 1, 2, … within a row; 0 is padding. Attend within equal ids, and to SHARED.
  mask: int32, 1 where tokens[b, t] was SAMPLED by the policy and is trained. Everything
    below belongs to the same place: the token at t is *predicted* at t−1, so the loss pairs
    logits[b, t−1] with tokens[b, t] where mask[b, t] = 1. Such a t has t−1 in its own segment:
    a segment never begins with a trained token.
  advantages: float32, the advantage of the turn that sampled the token; 0 where mask is 0.
  logprobs: float32, its behaviour log-probability (natural log); 0 where mask is 0.
  weights: float32, 1/N where mask is 1, else 0. N counts the batch's trajectories, also those
    that negative sample control discarded, and not their segments: the loss is
    −Σ weights · advantage · logprob, a mean over trajectories of sums over sampled tokens.
  versions: int32, the policy version that sampled the token; −1 where mask is 0.
  split: its rows are `row_tokens` / split wide, see `pack_by_length`.
  """
  tokens: np.ndarray
  positions: np.ndarray
  segment_ids: np.ndarray
  mask: np.ndarray
  advantages: np.ndarray
  logprobs: np.ndarray
  weights: np.ndarray
  versions: np.ndarray
  split: int = 1

  @property
  def padding_share(self) -> float:
    """Share of places that hold no token, whole padding rows included."""
    return float(np.mean(self.segment_ids == 0))

  def arrays(self) -> dict[str, np.ndarray]:
    """The columns by name, uncopied."""
    return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "split"}


def pack(items: Iterable[Item], row_tokens: int, rows_multiple: int = 1) -> Batch:
  """Packs the kept trajectories' segments, first fit by decreasing length.

  What trains is what Segment.mask calls sampled, no more and no less. That settles forced
  stops: a stop token that a server supplied by force (length, abort) is not in a
  segment as sampled, if at all; the tokens of a turn cut by its length (`truncated`) were all
  sampled and do train, with that turn's penalty and without any stop token to their credit.
  Tokens behind a segment's last sampled one (a final observation) can change no trained
  prediction and are left out; so is a segment with nothing sampled.

  Deterministic: equal lengths keep their order. B is the number of rows needed, rounded up to
  `rows_multiple` (at least one multiple, so that an empty batch has a shape that compiles).

  Raises ValueError when a segment does not fit a row, when advantages do not match turns,
  or when a sampled token lies in no turn.
  """
  (batch,) = pack_by_length(items, row_tokens, rows_multiple)
  return batch


def pack_by_length(items: Iterable[Item], row_tokens: int, rows_multiple: int = 1,
                   buckets: int = 1, share_prefix: bool = False) -> list[Batch]:
  """`pack` into rows of `buckets` widths: row_tokens, half of it, a quarter, and so on.

  A segment goes into the first row with room, the widest first; where there is none, it opens
  a row of the smallest width that holds it. One long and many short segments then do not
  make wide rows of padding. Where a row is 1/s as wide, `rows_multiple` counts s times, so that a
  micro-batch has as many tokens whatever its width. Widths that no segment needs are left
  out; there is always one batch.

  share_prefix: the tokens that all segments begin with stand once at the head of each row, as
  SHARED, and are computed once for all segments of the row. Each of these sees the same tokens at
  the same positions as without, so the loss and its gradient stay the same.
  """
  if buckets < 1 or row_tokens % 2 ** (buckets - 1):
    raise ValueError(f"row_buckets={buckets} halves row_tokens={row_tokens} {buckets - 1} times: "
                     f"make that a multiple of {2 ** max(buckets - 1, 0)}, or row_buckets smaller")
  items = list(items)
  pieces = []
  for trajectory, advantages, keep in items:
    if len(advantages) != len(trajectory.turns):
      raise ValueError(f"trajectory {trajectory.id} has {len(trajectory.turns)} turns but "
                       f"{len(advantages)} advantages")
    if keep:
      pieces += _pieces(trajectory, np.asarray(advantages, np.float32))
  longest = max((len(p["tokens"]) for p in pieces), default=0)
  if longest > row_tokens:
    raise ValueError(f"a segment of {longest} tokens does not fit a row of {row_tokens}: set "
                     f"row_tokens to {longest} or more, or lower max_context_tokens")
  widths = [row_tokens >> i for i in range(buckets)]
  shared = shared_prefix(pieces) if share_prefix else 0
  rows = _first_fit_decreasing([len(p["tokens"]) - shared for p in pieces], widths, shared)
  out = []
  for width in widths:
    of_width = [[pieces[i] for i in row] for w, row in rows if w == width]
    if of_width or not rows and width == row_tokens:
      split = row_tokens // width
      out.append(_lay(of_width, shared, width, rows_multiple * split, split, len(items)))
  return out


def padding_share(batches: Sequence[Batch]) -> float:
  """Share of places of all batches that hold no token, whole padding rows included."""
  places = sum(b.tokens.size for b in batches)
  return sum(b.padding_share * b.tokens.size for b in batches) / places


def from_demonstrations(trajectories: Iterable[types.Trajectory], row_tokens: int,
                        rows_multiple: int = 1) -> Batch:
  """A batch for imitation: every turn has advantage 1, so the loss is −Σ logprob / N."""
  return pack([(t, np.ones(len(t.turns)), True) for t in trajectories], row_tokens, rows_multiple)


def shared_prefix(pieces: Sequence[dict[str, np.ndarray]]) -> int:
  """How many tokens all segments begin with, at least one of each before its first trained one
  left out: what predicts a trained token stands in the token's own segment."""
  if len(pieces) < 2:
    return 0
  shared = min(int(np.argmax(p["mask"])) for p in pieces) - 1
  first = pieces[0]["tokens"][:shared]
  for p in pieces[1:]:
    differs = np.flatnonzero(p["tokens"][:len(first)] != first)
    first = first[:differs[0]] if len(differs) else first
  return len(first)


def _lay(rows: list[list[dict[str, np.ndarray]]], shared: int, width: int, multiple: int,
         split: int, trajectories: int) -> Batch:
  """The pieces of each row, end to end, behind their `shared` first tokens; a trained token's
  weight is 1 / trajectories."""
  batch = _empty(max(1, -(-len(rows) // multiple)) * multiple, width, split)
  for b, row in enumerate(rows):
    head = {name: column[:shared] for name, column in row[0].items()}
    rests = [{name: column[shared:] for name, column in piece.items()} for piece in row]
    parts = [(SHARED, 0, head)] + [(n, shared, rest) for n, rest in enumerate(rests, 1)]
    start = 0
    for segment, position, part in parts:
      stop = start + len(part["tokens"])
      for name, column in part.items():
        getattr(batch, name)[b, start:stop] = column
      batch.positions[b, start:stop] = np.arange(position, position + stop - start)
      batch.segment_ids[b, start:stop] = segment
      batch.weights[b, start:stop] = part["mask"] / trajectories
      start = stop
  return batch


def _empty(rows: int, width: int, split: int) -> Batch:
  shape = (rows, width)
  ints = ("tokens", "positions", "segment_ids", "mask")
  floats = ("advantages", "logprobs", "weights")
  return Batch(**{name: np.zeros(shape, np.int32) for name in ints},
               **{name: np.zeros(shape, np.float32) for name in floats},
               versions=np.full(shape, -1, np.int32), split=split)


def _pieces(trajectory: types.Trajectory, advantages: np.ndarray) -> list[dict[str, np.ndarray]]:
  """The trajectory's segments with trained tokens, cut behind the last: columns [length]."""
  pieces = []
  for s, segment in enumerate(trajectory.segments):
    columns = segment.arrays()
    sampled = np.flatnonzero(columns["mask"])
    if not len(sampled):
      continue
    if sampled[0] == 0:
      raise ValueError(f"segment {s} of trajectory {trajectory.id} begins with a sampled token: "
                       "nothing precedes it that could predict it")
    turn_of = np.full(len(segment), -1)
    for i, turn in enumerate(trajectory.turns):
      if turn.segment == s:
        turn_of[turn.start:turn.stop] = i
    if np.any(turn_of[sampled] < 0):
      raise ValueError(f"segment {s} of trajectory {trajectory.id} has sampled tokens "
                       "outside its turns")
    trained = columns["mask"] == 1
    end = sampled[-1] + 1
    pieces.append({
        "tokens": columns["tokens"][:end],
        "mask": columns["mask"][:end],
        "advantages": np.where(trained, advantages[turn_of], 0)[:end],
        "logprobs": np.where(trained, columns["logprobs"], 0)[:end],
        "versions": np.where(trained, columns["versions"], -1)[:end],
    })
  return pieces


def _first_fit_decreasing(lengths: list[int], widths: list[int], taken: int = 0
                          ) -> list[tuple[int, list[int]]]:
  """Rows (width, indices into `lengths`) that hold their lengths; widths: widest first; taken:
  places of every row that are."""
  rows: list[tuple[int, list[int]]] = []
  free: list[int] = []
  for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    for b, room in enumerate(free):
      if lengths[index] <= room:
        break
    else:
      b = len(rows)
      width = [w for w in widths if w - taken >= lengths[index]][-1]
      rows.append((width, []))
      free.append(width - taken)
    rows[b][1].append(index)
    free[b] -= lengths[index]
  return rows
