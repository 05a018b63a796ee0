"""The browser: rendering, paging, finding, hostile pages and the session's page."""

import asyncio
import json

import hypothesis
from hypothesis import strategies as st
import pytest

from kr.tools import browser, search

PAGE = """<html><head><title>Ayacucho</title><script>no()</script><style>no</style></head>
<body><h1>Ayacucho</h1><p>Ayacucho is a city in <a href="/peru">Peru</a>.</p>
<table><tr><th>country:</th><td><a href="/peru#top">Peru</a></td></tr>
<tr><th>population</th><td>140033</td></tr><tr><th>a</th><th>b</th><td>c</td></tr>
<tr><td>x</td><td>y</td></tr></table>
<ul><li>near <a href="lima">Lima <i>city</i></a><li><a href="mailto:x@y">mail</a></ul></body>"""
LINES = ["Ayacucho", "Ayacucho is a city in [1] Peru.", "country: [1] Peru", "population: 140033",
         "a | b | c", "x | y", "near [2] Lima city", "mail"]
LINKS = ["https://w/peru", "https://w/city/lima"]
URL = "https://w/city/ayacucho"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
  path = tmp_path_factory.mktemp("world")
  pages = [(URL, "Ayacucho", PAGE), ("https://w/peru", "Peru", "<p>No title in the page.</p>"),
           ("https://w/empty", "", ""),
           ("https://w/wide", "Wide", "<p>" + "word " * 2000 + "<p>needle")]
  assert browser.PageStore.write(path / "pages.db", pages) == 4
  search.build_index([{"url": u, "title": t, "text": "\n".join(browser.render(h, u)[0])}
                      for u, t, h in pages], path / "index")
  return path


@pytest.fixture
def make(world):
  def make(**options):
    searcher = search.Search(world / "index")
    pages = browser.Browser(browser.PageStore(world / "pages.db"), searcher, **options)
    return {tool.spec.name: tool for tool in [searcher, *pages.tools()]}
  return make


def call(tools, name, session="s", **arguments):
  return asyncio.run(tools[name].call(session, arguments))


def test_a_page_is_lines_with_numbered_links():
  assert browser.render(PAGE, URL) == (LINES, LINKS)


@pytest.mark.parametrize("html, lines", [
    ("<p>a<br>b<p>c", ["a", "b", "c"]),
    ("a  \n b\t<b>c</b>d", ["a b cd"]),
    ("<pre>a\n  b</pre>", ["a", "b"]),
    ("<p>&lt;b&gt; &amp;&nbsp;&eacute;", ["<b> & é"]),
    ("<div hidden>no</div><svg><text>no</text></svg>yes<!-- no -->", ["yes"]),
    ("<a href='http://['>bad</a> <a href='javascript:x'>js</a> <a>none</a> <a href='#x'>here</a>",
     ["bad js none here"]),
    ("<a href='/x'> padded</a><a href='/x'></a>", ["[1] padded"]),
    ("<a href='/x'><div>block</div></a>", ["[1] block"]),
    ("<table><tr><td>a<td><table><tr><th>k<td>v</table></table>", ["a | k: v"]),
    ("<title>One</title><h2>Two</h2>", ["One", "Two"]),
    ("\x00\x07a\u202eb\ud800", ["a b?"]),
    ("<table><tr><td></table>", []),
])
def test_rendering(html, lines):
  assert browser.render(html, "https://w/")[0] == lines


def test_long_paragraphs_wrap_so_that_all_of_them_can_be_read():
  lines, _ = browser.render("<p>" + "word " * 1000 + "x" * 1500, "https://w/")
  assert all(len(line) <= 600 for line in lines)
  assert " ".join(lines).count("word") == 1000 and "".join(lines).count("x") == 1500


@pytest.mark.parametrize("html", [
    "<div>" * 200_000 + "deep", "<b>" * 2000 + "<p>x" * 2000, "<table><tr><td>" * 3000,
    "<p>" * 20_000, "<a href=x>" * 5000, "</" * 50_000, "<" * 50_000, "<!--" * 50_000, "", "<svg>",
    "<plaintext>x", "<frameset>", "&#x110000;&#xd800;", b"\xff\xfe<p>\x80\x81", "x" * 3_000_000],
    ids=lambda html: repr(html[:8]))
def test_hostile_pages_render_to_something(html):
  lines, links = browser.render(html, "https://w/")
  assert all(isinstance(line, str) for line in lines + links)


PIECES = st.lists(st.sampled_from(
    ["<a href='", "'>", "</a>", "<table>", "<tr>", "<td>", "</td>", "</tr>", "</table>", "<p>",
     "<pre>", "</pre>", "<title>", "</title>", "<br>", "<li>", "<script>", "x", " ", "\n", "[1]",
     "http://[", "<template>", "<svg>", "<th>", "<b", "&", "\0"]) | st.text(max_size=5),
                  max_size=40).map("".join)


@hypothesis.given(PIECES, st.sampled_from(["https://w/a", "", "http://[", "x:y"]))
def test_no_html_makes_rendering_raise(html, base_url):
  lines, links = browser.render(html, base_url)
  assert all(line.strip() and "\n" not in line for line in lines)
  assert len(set(links)) == len(links)


def test_open_shows_a_window_and_says_where_it_is(make):
  tools = make(lines=3)
  result = call(tools, "open", id=URL)
  assert result.text.split("\n") == [*LINES[:3], "(lines 1-3 of 8)"]
  assert result.ok and result.meta == {"url": URL}
  assert call(tools, "open", id=URL, loc=7).text.split("\n") == [*LINES[6:], "(lines 7-8 of 8)"]
  assert call(make(), "open", id=URL).text.split("\n") == LINES
  beyond = call(tools, "open", id=URL, loc=9)
  assert (beyond.ok, beyond.text) == (False, "no line 9: the page has 8 lines")


def test_open_follows_results_links_and_urls(make):
  tools = make()
  call(tools, "search", queries=["Ayacucho"])
  assert call(tools, "open", id="r1").meta == {"url": URL}
  assert call(tools, "open", id=1).text == "Peru\nNo title in the page."
  assert call(tools, "open", id=URL + "#part").meta == {"url": URL}


def test_what_cannot_be_opened_is_explained_and_leaves_the_page_open(make):
  tools = make()
  for target, text in [
      (1, "no page is open: links are numbers of the current page"),
      ("r1", "no result r1: there are no results yet"),
      ("https://elsewhere/", "no such page: https://elsewhere/"), ("", "no such page: "),
      ("\ud800", "no such page: ?")]:
    result = call(tools, "open", id=target)
    assert (result.ok, browser.clean(result.text), result.meta) == (False, text, {})
  call(tools, "search", queries=["Ayacucho"])
  call(tools, "open", id="r1")
  assert call(tools, "open", id=3).text == "no link 3: the page has links 1 to 2"
  assert call(tools, "open", id=2).text == "no such page: https://w/city/lima"
  assert call(tools, "open", id="r99").text.startswith("no result r99: the results are r1 to r")
  assert call(tools, "find", pattern="140033").text == "4: population: 140033"


def test_find_lists_matching_lines_of_the_current_page_within_bounds(make):
  tools = make(max_matches=2)
  assert call(tools, "find", pattern="x").ok is False
  call(tools, "open", id=URL)
  assert call(tools, "find", pattern="PERU").text == (
      "2: Ayacucho is a city in [1] Peru.\n3: country: [1] Peru")
  assert call(tools, "find", pattern="zzz").text == "no match"
  assert call(tools, "find", pattern="a").text.endswith("\n(2 of 6 matches)")
  assert call(tools, "find", session="other", pattern="Peru").ok is False


def test_results_are_bounded(make):
  tools = make(max_chars=700)
  assert call(tools, "open", id="https://w/empty").text == "(empty page)"
  result = call(tools, "open", id="https://w/wide")
  assert len(result.text) <= 700 and result.text.endswith("(lines 1-2 of 19)")
  assert len(call(tools, "find", pattern="word").text) <= 700


def test_the_current_page_survives_a_move_to_another_process(make):
  tools, other = make(), make()
  call(tools, "open", id=URL)
  assert tools["find"].snapshot("s") is None
  other["open"].restore("s", json.loads(json.dumps(tools["open"].snapshot("s"))))
  assert call(other, "find", pattern="mail").text == "8: mail"
  assert call(other, "open", id=1).meta == {"url": "https://w/peru"}
  asyncio.run(other["open"].close("s"))
  assert other["open"].snapshot("s") is None


def test_a_store_refuses_what_is_not_one(tmp_path):
  with pytest.raises(FileNotFoundError, match="build the world"):
    browser.PageStore(tmp_path / "pages.db")
  (tmp_path / "pages.db").write_text("not a database, " * 100)
  with pytest.raises(ValueError, match="not a page store"):
    browser.PageStore(tmp_path / "pages.db")
  with pytest.raises(ValueError, match="two pages share a URL"):
    browser.PageStore.write(tmp_path / "other.db", [("u", "a", "b"), ("u", "c", "d")])
  assert not (tmp_path / "other.db").exists()


def test_a_store_is_a_function_of_its_pages_alone(tmp_path):
  pages = [(f"https://w/{i}", str(i), "x" * i) for i in range(50)]
  browser.PageStore.write(tmp_path / "a.db", pages)
  browser.PageStore.write(tmp_path / "b.db", reversed(pages))
  assert (tmp_path / "a.db").read_bytes() == (tmp_path / "b.db").read_bytes()
  store = browser.PageStore(tmp_path / "a.db")
  assert store.get("https://w/7") == ("7", "xxxxxxx") and store.get("nope") is None
  assert store.urls() == sorted(url for url, _, _ in pages)
