import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from kr import types
from kr.model.config import SHARED
from kr.rl import batch


def trajectory(name, *segments):
  """A turn per ('s', ids) piece, context per ('c', ids) piece; logprob -id/100, version = turn."""
  result = types.Trajectory(name, types.Task(name, "?", "!", "kind"))
  for s, pieces in enumerate(segments):
    segment = types.Segment()
    for kind, ids in pieces:
      if kind == "c":
        segment.append_context(list(ids))
      else:
        start, version = len(segment), len(result.turns)
        segment.append_sampled(list(ids), [-i / 100 for i in ids], version)
        result.turns.append(types.Turn(s, start, len(segment), version))
    result.segments.append(segment)
  return result


def test_columns_by_hand():
  long = trajectory("a", [("c", [10, 11]), ("s", [12, 13]), ("c", [14]), ("s", [15])])
  # The last observation is cut off.
  short = trajectory("b", [("c", [20]), ("s", [21]), ("c", [22, 23])])
  got = batch.pack([(short, [-1.0], True), (long, [0.5, 2.0], True)], row_tokens=9)
  expected = {
      "tokens": [10, 11, 12, 13, 14, 15, 20, 21, 0],
      "positions": [0, 1, 2, 3, 4, 5, 0, 1, 0],
      "segment_ids": [1, 1, 1, 1, 1, 1, 2, 2, 0],
      "mask": [0, 0, 1, 1, 0, 1, 0, 1, 0],
      "advantages": [0, 0, 0.5, 0.5, 0, 2, 0, -1, 0],
      "logprobs": [0, 0, -0.12, -0.13, 0, -0.15, 0, -0.21, 0],
      "weights": [0, 0, 0.5, 0.5, 0, 0.5, 0, 0.5, 0],
      "versions": [-1, -1, 0, 0, -1, 1, -1, 0, -1],
  }
  for name, column in got.arrays().items():
    np.testing.assert_allclose(column, [expected[name]], rtol=1e-6, err_msg=name)
  assert got.padding_share == pytest.approx(1 / 9)


def test_segments_of_a_cut_context_share_the_trajectorys_weight():
  cut = trajectory("a", [("c", [1]), ("s", [2])], [("c", [1, 3]), ("s", [4])], [("c", [5])])
  got = batch.pack([(cut, [1.0, 2.0], True)], row_tokens=8)
  # The third segment sampled nothing.
  np.testing.assert_array_equal(got.tokens[0], [1, 3, 4, 1, 2, 0, 0, 0])
  np.testing.assert_array_equal(got.advantages[0], [0, 0, 2, 0, 1, 0, 0, 0])
  np.testing.assert_array_equal(got.weights[0], [0, 0, 1, 0, 1, 0, 0, 0])


def test_discarded_trajectories_count_in_the_weight_and_nowhere_else():
  items = [(trajectory(str(i), [("c", [1]), ("s", [2 + i])]), [1.0], i == 1) for i in range(4)]
  got = batch.pack(items, row_tokens=4)
  np.testing.assert_array_equal(got.tokens, [[1, 3, 0, 0]])
  np.testing.assert_array_equal(got.weights, [[0, 0.25, 0, 0]])


def test_truncated_turn_trains_what_was_sampled_and_no_forced_stop():
  stop_id = 99
  cut = trajectory("a", [("c", [1]), ("s", [2, 3]), ("c", [stop_id])])
  cut.turns[0].fault, cut.stop = "truncated", types.StopReason.INVALID_ACTION
  got = batch.pack([(cut, [-1.0], True)], row_tokens=4)
  np.testing.assert_array_equal(got.tokens, [[1, 2, 3, 0]])
  np.testing.assert_array_equal(got.mask, [[0, 1, 1, 0]])
  cut.segments[0].append_context([5])
  cut.segments[0].append_sampled([6], [-0.1], 1)
  cut.turns.append(types.Turn(0, 5, 6, 1))
  got = batch.pack([(cut, [-1.0, -1.0], True)], row_tokens=6)
  np.testing.assert_array_equal(got.tokens, [[1, 2, 3, stop_id, 5, 6]])
  np.testing.assert_array_equal(got.mask, [[0, 1, 1, 0, 0, 1]])


def test_rows_are_padded_to_the_multiple_and_an_empty_batch_has_a_shape():
  items = [(trajectory(str(i), [("c", [1]), ("s", [2, 3])]), [1.0], True) for i in range(5)]
  got = batch.pack(items, row_tokens=4, rows_multiple=4)
  assert got.tokens.shape == (8, 4)
  assert (got.segment_ids[5:] == 0).all() and (got.mask[5:] == 0).all()
  empty = batch.pack([(items[0][0], [1.0], False)], row_tokens=4, rows_multiple=2)
  assert empty.tokens.shape == (2, 4) and empty.mask.sum() == 0 and empty.padding_share == 1.0
  assert batch.pack([], 4, 2).tokens.shape == (2, 4)


def test_first_fit_decreasing_fills_the_first_row_with_room():
  # Lengths 3, 6, 4, 5 in rows of 10: 6 opens row 0, 5 row 1, 4 joins 6, 3 joins 5.
  items = [(trajectory(str(n), [("c", [n]), ("s", [n] * (n - 1))]), [1.0], True)
           for n in (3, 6, 4, 5)]
  got = batch.pack(items, row_tokens=10)
  np.testing.assert_array_equal(got.tokens, [[6] * 6 + [4] * 4, [5] * 5 + [3] * 3 + [0] * 2])


def test_segment_longer_than_a_row_names_the_fix():
  item = (trajectory("a", [("c", [1]), ("s", [2, 3, 4])]), [1.0], True)
  with pytest.raises(ValueError, match="row_tokens to 4 or more"):
    batch.pack([item], row_tokens=3)


@pytest.mark.parametrize("broken, message", [
    (lambda t: t.turns.append(t.turns[0]), "2 turns but 1 advantages"),
    (lambda t: setattr(t.turns[0], "stop", 2), "outside its turns"),
    (lambda t: t.segments[0].mask.__setitem__(0, 1), "begins with a sampled token"),
])
def test_broken_trajectories_raise(broken, message):
  t = trajectory("a", [("c", [1]), ("s", [2, 3])])
  broken(t)
  with pytest.raises(ValueError, match=message):
    batch.pack([(t, [1.0], True)], row_tokens=4)


def of_lengths(*lengths):
  """Items of one segment each, n times the id n."""
  return [(trajectory(str(n), [("c", [n]), ("s", [n] * (n - 1))]), [1.0], True) for n in lengths]


def test_each_segment_opens_the_narrowest_row_that_holds_it():
  # Widths 16, 8, 4. 9 opens a wide row, and 7 fills it; 6 a half one, and 2 fills it; 3 and 3
  # one of a quarter each, of which four are as much as a wide row.
  got = batch.pack_by_length(of_lengths(3, 9, 6, 2, 7, 3), 16, 1, buckets=3)
  assert [(b.tokens.shape, b.split) for b in got] == [((1, 16), 1), ((2, 8), 2), ((4, 4), 4)]
  np.testing.assert_array_equal(got[0].tokens, [[9] * 9 + [7] * 7])
  np.testing.assert_array_equal(got[1].tokens, [[6] * 6 + [2] * 2, [0] * 8])
  np.testing.assert_array_equal(got[2].tokens[:2], [[3] * 3 + [0]] * 2)
  assert not got[2].tokens[2:].any()
  np.testing.assert_allclose(sum(b.weights.sum() for b in got), (8 + 6 + 5 + 1 + 2 + 2) / 6)
  assert batch.padding_share(got) == pytest.approx(1 - 30 / 48)


def test_short_segments_beside_a_long_one_are_not_all_padding():
  items = of_lengths(64, *[5] * 30)
  wide, (long, short) = batch.pack(items, 64, 4), batch.pack_by_length(items, 64, 4, buckets=4)[:2]
  assert wide.tokens.shape == (4, 64) and long.tokens.shape == (4, 64)
  assert short.tokens.shape == (32, 8) and short.split == 8
  assert (short.segment_ids > 0).any(1).sum() == 30


def test_one_width_is_the_plain_packing():
  items = of_lengths(3, 9, 6, 2)
  (got,) = batch.pack_by_length(items, 12, 2, buckets=1)
  for name, column in batch.pack(items, 12, 2).arrays().items():
    np.testing.assert_array_equal(column, got.arrays()[name])
  assert batch.pack_by_length([], 8, 2, buckets=3)[0].tokens.shape == (2, 8)


def test_a_shared_prefix_stands_once_a_row_and_leaves_what_is_trained_as_it_was():
  # All begin with 7 7 7; the fourth 7 of two of them is not shared, nor is the token before the
  # first trained one of "b", 7 as well.
  items = [(trajectory("a", [("c", [7, 7, 7, 7, 1]), ("s", [2])]), [1.0], True),
           (trajectory("b", [("c", [7, 7, 7, 7]), ("s", [3, 4]), ("c", [5]), ("s", [6])]),
            [2.0, 3.0], True),
           (trajectory("c", [("c", [9]), ("s", [9])]), [5.0], False),
           (trajectory("d", [("c", [7, 7, 7, 8]), ("s", [9])]), [4.0], True)]
  (got,) = batch.pack_by_length(items, 11, share_prefix=True)
  S = SHARED
  expected = {
      "tokens": [[7, 7, 7, 7, 3, 4, 5, 6, 7, 1, 2], [7, 7, 7, 8, 9, 0, 0, 0, 0, 0, 0]],
      "positions": [[0, 1, 2, 3, 4, 5, 6, 7, 3, 4, 5], [0, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0]],
      "segment_ids": [[S, S, S, 1, 1, 1, 1, 1, 2, 2, 2], [S, S, S, 1, 1, 0, 0, 0, 0, 0, 0]],
      "mask": [[0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]],
      "advantages": [[0, 0, 0, 0, 2, 2, 0, 3, 0, 0, 1], [0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0]],
  }
  for name, rows in expected.items():
    np.testing.assert_array_equal(got.arrays()[name], rows, err_msg=name)
  np.testing.assert_array_equal(got.weights, got.mask / 4)


def test_rows_of_all_widths_have_room_for_the_shared_prefix():
  items = [(trajectory(str(i), [("c", [7] * 5 + [i]), ("s", [i] * n)]), [1.0], True)
           for i, n in enumerate((1, 9, 2, 2))]
  got = batch.pack_by_length(items, 16, buckets=2, share_prefix=True)
  # Rests of 10, 3, 3, 2 places; rows of 16 - 5 and 8 - 5.
  assert [(b.tokens.shape, (b.segment_ids > 0).sum(1).tolist()) for b in got] == [
      ((1, 16), [15]), ((4, 8), [8, 8, 7, 0])]


@pytest.mark.parametrize("prompts", [[[1, 2]], [[1, 2], [3, 2]], [[1], [1]], []])
def test_without_anything_to_share_rows_are_as_they_were(prompts):
  items = [(trajectory(str(i), [("c", p), ("s", [4])]), [1.0], True)
           for i, p in enumerate(prompts)]
  (got,) = batch.pack_by_length(items, 8, share_prefix=True)
  for name, column in batch.pack(items, 8).arrays().items():
    np.testing.assert_array_equal(column, got.arrays()[name])


def test_widths_that_are_no_whole_numbers_are_refused():
  with pytest.raises(ValueError, match="row_buckets=3 .* a multiple of 4"):
    batch.pack_by_length([], 10, 1, buckets=3)


def test_demonstrations_have_advantage_one_everywhere():
  items = [trajectory(str(i), [("c", [1]), ("s", [2]), ("c", [3]), ("s", [4, 5])])
           for i in range(2)]
  got = batch.from_demonstrations(items, row_tokens=10, rows_multiple=2)
  np.testing.assert_array_equal(got.advantages, got.mask)
  np.testing.assert_array_equal(got.weights, got.mask / 2)
  assert got.mask.sum() == 6 and got.tokens.shape == (2, 10)


PIECE = st.tuples(st.sampled_from("cs"), st.integers(1, 5))


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    shapes=st.lists(st.lists(st.lists(PIECE, max_size=5), min_size=1, max_size=3), max_size=6),
    keeps=st.lists(st.booleans(), min_size=6, max_size=6), room=st.integers(0, 20),
    multiple=st.integers(1, 3))
def test_every_sampled_token_is_packed_once_with_its_turns_advantage(shapes, keeps, room, multiple):
  counter = iter(range(1, 10**6))  # unique ids: a token names its place
  items, expected = [], {}
  for j, shape in enumerate(shapes):
    ids = lambda n: [next(counter) for _ in range(n)]
    t = trajectory(str(j), *[[("c", ids(1))] + [(kind, ids(n)) for kind, n in s] for s in shape])
    advantages = [100.0 * j + i for i in range(len(t.turns))]
    items.append((t, advantages, keeps[j]))
    for turn, a in zip(t.turns, advantages):
      segment = t.segments[turn.segment]
      for k in range(turn.start, turn.stop):
        if keeps[j]:
          expected[segment.tokens[k]] = (a, segment.tokens[:k], segment.versions[k])
  row_tokens = max([len(s) for t, _, _ in items for s in t.segments], default=1) + room
  got = batch.pack(items, row_tokens, multiple)
  assert len(got.tokens) % multiple == 0
  assert got.mask.sum() == len(expected)
  for b, t in np.argwhere(got.mask):
    a, prefix, version = expected.pop(got.tokens[b, t])
    start = t - got.positions[b, t]
    assert got.tokens[b, start:t].tolist() == prefix  # its own segment's history, unbroken
    assert len(set(got.segment_ids[b, start:t + 1])) == 1 and got.segment_ids[b, t] > 0
    assert got.advantages[b, t] == np.float32(a) and got.versions[b, t] == version
    assert got.logprobs[b, t] == np.float32(-got.tokens[b, t] / 100)
    assert got.weights[b, t] == np.float32(1 / len(items))
  assert not expected
  for name in ("advantages", "logprobs", "weights"):
    assert (getattr(got, name)[got.mask == 0] == 0).all()
