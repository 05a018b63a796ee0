"""Search: ranking, ids, snippets, hostile queries and damaged indexes."""

import asyncio
import json
import random

import hypothesis
from hypothesis import strategies as st
import pytest

from kr.tools import search

DOCS = [
    {"url": "https://w/ayacucho", "title": "Ayacucho",
     "text": "Ayacucho is a city in Peru. country: Peru population: 140033"},
    {"url": "https://w/peru", "title": "Peru", "text": "Peru is a country. Its capital is Lima."},
    {"url": "https://w/lima", "title": "Lima",
     "text": "Lima is the capital of Peru. Peru, Peru and Peru again: Lima is in Peru."},
    {"url": "https://w/saopaulo", "title": "São Paulo", "text": "São Paulo is a city in Brazil."},
    {"url": "https://w/long", "title": "Long",
     "text": " ".join(f"w{i}" for i in range(50)) + " needle " + " ".join(["z"] * 50)},
    {"url": "https://w/b", "title": "Twin", "text": "same words"},
    {"url": "https://w/a", "title": "Twin", "text": "same words"},
    {"url": "https://w/marks", "title": "???", "text": "a page whose title has no letters"},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  path = tmp_path_factory.mktemp("search") / "index"
  assert search.build_index(DOCS, path) == len(DOCS)
  return path


@pytest.fixture
def tool(path):
  return search.Search(path, top_k=3, snippet_words=6)


def ask(tool, *queries, session="s"):
  return asyncio.run(tool.call(session, {"queries": list(queries)})).text


def test_each_query_has_a_block_and_ids_run_on(tool):
  assert ask(tool, "Ayacucho", "nothing at all") == (
      "# Ayacucho\nr1 Ayacucho: Ayacucho is a city in Peru.\n# nothing at all\nno results")
  assert ask(tool, "Ayacucho").startswith("# Ayacucho\nr2 Ayacucho:")
  assert tool.resolve("s", "r2") == "https://w/ayacucho"
  assert ask(tool, "Ayacucho", session="other").startswith("# Ayacucho\nr1 ")


def test_the_page_with_the_querys_title_comes_first(tool):
  for title in ("Peru", "Lima", "São Paulo", "sao  paulo", "PERU", "???"):
    urls = [url for url, _, _ in tool.rank(title)]
    assert urls[0] == next(d["url"] for d in DOCS
                           if d["title"].lower().replace("ã", "a")
                           == " ".join(title.lower().replace("ã", "a").split()))


def test_equal_scores_are_ordered_by_url(tool):
  assert [url for url, _, _ in tool.rank("twin same words")] == ["https://w/a", "https://w/b"]


def test_a_snippet_is_around_the_first_match_else_the_beginning(tool):
  assert ask(tool, "needle") == "# needle\nr1 Long: w48 w49 needle z z z"
  assert ask(tool, "Long") == "# Long\nr2 Long: w0 w1 w2 w3 w4 w5"


def test_rankings_do_not_depend_on_the_order_of_the_documents(tmp_path, tool):
  docs = DOCS[:]
  random.Random(0).shuffle(docs)
  search.build_index(docs, tmp_path / "index")
  again = search.Search(tmp_path / "index", top_k=8)
  for query in ("city in peru", "capital", "twin", "same words", "a page"):
    assert again.rank(query) == tool.rank(query, 8)


@hypothesis.given(st.text(alphabet=st.characters(), max_size=200)
                  | st.text(alphabet='AND OR NOT +-!(){}[]^"~*?:\\/title\ud800', max_size=200))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_query_text_is_data(tool, query):
  first, *rest = ask(tool, query).split("\n")
  assert first.startswith("# ") and rest


@pytest.mark.parametrize(
    "bad", ["r0", "r2", "r-1", "r", "", "1", "x1", "r1.0", "r¹", f"r{10 ** 40}"])
def test_an_id_that_was_not_given_resolves_to_nothing(tool, bad):
  ask(tool, "Ayacucho")
  assert tool.resolve("s", bad) is None


def test_result_ids_survive_a_move_to_another_process(path, tool):
  ask(tool, "Peru", "Ayacucho")
  state = json.loads(json.dumps(tool.snapshot("s")))
  other = search.Search(path)
  other.restore("s", state)
  assert other.resolve("s", "r1") == "https://w/peru"
  count = other.count("s")
  assert f"r{count + 1} Ayacucho" in ask(other, "Ayacucho")
  asyncio.run(other.close("s"))
  assert other.snapshot("s") is None


def test_two_documents_of_one_url_are_refused(tmp_path):
  with pytest.raises(ValueError, match="https://w/a"):
    search.build_index([DOCS[5], DOCS[6], DOCS[6]], tmp_path / "index")
  assert not (tmp_path / "index").exists()


def test_a_missing_or_damaged_index_is_named(tmp_path):
  with pytest.raises(search.SearchError, match="no search index at .*build it again"):
    search.Search(tmp_path / "index")
  search.build_index(DOCS, tmp_path / "index")
  (tmp_path / "index" / "meta.json").write_text("{")
  with pytest.raises(search.SearchError, match="damaged.*build it again"):
    search.Search(tmp_path / "index")
  search.build_index(DOCS, tmp_path / "index")
  for file in (tmp_path / "index").glob("*.store"):
    file.unlink()
  with pytest.raises(search.SearchError, match="damaged.*build it again"):
    search.Search(tmp_path / "index").rank("Peru")


def test_reading_leaves_the_index_as_it_is(path):
  before = {p.name: p.stat().st_mtime_ns for p in path.iterdir()}
  path.chmod(0o555)
  try:
    ask(search.Search(path), "Peru")
  finally:
    path.chmod(0o755)
  assert {p.name: p.stat().st_mtime_ns for p in path.iterdir()} == before
