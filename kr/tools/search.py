"""Full-text search over the world's pages (tantivy), deterministic and without query syntax."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import pathlib
import shutil
from typing import Any, Iterable

import tantivy

from kr.tools.base import ToolSpec, clean, clip
from kr.types import ToolResult

_META = "kr_index.json"
_FORMAT = 1
_HEAP_BYTES = 256 << 20      # a world's documents fit, so that there is one segment
_MAX_TERMS = 32              # terms of one query that count
_TITLE_BOOST = 3.0
_EXACT_BOOST = 1000.0        # above any BM25 score of a short query
# Words that match nearly every page; ignored unless the query has no others.
_STOP_WORDS = frozenset(
    "a an and are as at by for from has have how in is it its of on or that the their this to was "
    "were what when where which who whose with".split())


class SearchError(ValueError):
  """The index is missing, damaged or of another format."""


def _analyzer() -> tantivy.TextAnalyzer:
  builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
  for step in (tantivy.Filter.remove_long(60), tantivy.Filter.lowercase(),
               tantivy.Filter.ascii_fold()):
    builder = builder.filter(step)
  return builder.build()


_ANALYZER = _analyzer()


def tokens(text: str) -> list[str]:
  """The index's tokens of `text`: runs of letters and digits, lower case, accents folded."""
  return _ANALYZER.analyze(clean(text))


def _key(text: str) -> str:
  """What two titles share when a query for one should find the other first."""
  return " ".join(tokens(text)) or clean(text).strip().casefold()


def _schema() -> tantivy.Schema:
  builder = tantivy.SchemaBuilder()
  builder.add_text_field("url", stored=True, tokenizer_name="raw", index_option="basic")
  builder.add_text_field("key", stored=False, tokenizer_name="raw", index_option="basic")
  builder.add_text_field("title", stored=True, tokenizer_name="kr", index_option="freq")
  builder.add_text_field("text", stored=True, tokenizer_name="kr", index_option="freq")
  return builder.build()


def build_index(docs: Iterable[dict[str, str]], path: str | os.PathLike) -> int:
  """Writes a fresh index of `docs` (each with url, title, text) to the directory `path`.

  Replaces what is there, only after the new index is complete. Documents go in by URL through
  one thread, so that the ranking does not depend on their order or on scheduling. Returns the
  number of documents. Raises ValueError when a URL occurs twice.
  """
  path = pathlib.Path(path)
  rows = sorted(docs, key=lambda d: d["url"])
  for a, b in zip(rows, rows[1:]):
    if a["url"] == b["url"]:
      raise ValueError(f"two documents have the URL {a['url']!r}")
  building = path.with_name(path.name + ".building")
  shutil.rmtree(building, ignore_errors=True)
  building.mkdir(parents=True)
  index = tantivy.Index(_schema(), path=str(building))
  index.register_tokenizer("kr", _ANALYZER)
  writer = index.writer(_HEAP_BYTES, 1)
  for row in rows:
    title = clean(row["title"])
    writer.add_document(tantivy.Document(
        url=clean(row["url"]), key=_key(title), title=title, text=clean(row["text"])))
  writer.commit()
  writer.wait_merging_threads()
  (building / _META).write_text(json.dumps({"format": _FORMAT, "docs": len(rows)}))
  shutil.rmtree(path, ignore_errors=True)
  os.replace(building, path)
  return len(rows)


def _open_index(path: pathlib.Path) -> tantivy.Index:
  """Opens the index for reading; raises SearchError with what to do."""
  again = "build it again (kr.tools.search.build_index)"
  if not (path / _META).is_file():
    raise SearchError(f"no search index at {path}: {again}")
  try:
    meta = json.loads((path / _META).read_text())
    wanted, found = meta["docs"], meta["format"]
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise SearchError(f"the search index at {path} is damaged ({e}): {again}") from None
  if found != _FORMAT:
    raise SearchError(f"the search index at {path} has format {found}, not {_FORMAT}: {again}")
  try:
    index = tantivy.Index.open(str(path))
    index.register_tokenizer("kr", _ANALYZER)
    index.config_reader("Manual", 0)
    index.reload()
    count = index.searcher().num_docs
  except Exception as e:  # tantivy raises ValueError, OSError and its own panics
    why = clip(str(e), 200)
    raise SearchError(f"the search index at {path} is damaged ({why}): {again}") from None
  if count != wanted:
    why = f"{count} of {wanted} documents"
    raise SearchError(f"the search index at {path} is damaged ({why}): {again}")
  return index


class Search:
  """The `search` tool: a list of queries in, ranked titles with ids and snippets out.

  Result ids r1, r2, … run on within a session. Ranking is BM25 with titles weighted, the page
  whose title equals the query first, ties by URL. Raises SearchError when the index at
  `index_path` cannot be used.
  """

  def __init__(self, index_path: str | os.PathLike, top_k: int = 3, snippet_words: int = 12,
               max_chars: int = 4000):
    self.spec = ToolSpec(
        "search", "Searches the web. Each query gets its own ranked results with ids to open.",
        {"type": "object", "additionalProperties": False, "required": ["queries"],
         "properties": {"queries": {
             "type": "array", "minItems": 1, "maxItems": 8,
             "items": {"type": "string", "maxLength": 200}}}})
    self._index = _open_index(pathlib.Path(index_path))
    self._schema = self._index.schema
    self._searcher = self._index.searcher()
    if min(top_k, snippet_words, max_chars) < 1:
      raise ValueError(f"top_k, snippet_words and max_chars must be at least 1, not {top_k}, "
                       f"{snippet_words} and {max_chars}")
    self._top_k, self._snippet_words, self._max_chars = top_k, snippet_words, max_chars
    self._urls: dict[str, list[str]] = {}    # session -> URL of r1, r2, …
    self._threads = concurrent.futures.ThreadPoolExecutor(4, "search")

  async def call(self, session_id: str, arguments: dict[str, Any]) -> ToolResult:
    loop = asyncio.get_running_loop()
    queries = [" ".join(clean(q).split()) for q in arguments["queries"]]
    found = await asyncio.gather(
        *(loop.run_in_executor(self._threads, self.rank, query) for query in queries))
    urls = self._urls.setdefault(session_id, [])
    lines = []
    for query, hits in zip(queries, found):
      lines.append(f"# {query}")
      for url, title, text in hits:
        urls.append(url)
        lines.append(f"r{len(urls)} {title}: {self._snippet(text, query)}".rstrip(": "))
      if not hits:
        lines.append("no results")
    return ToolResult(clip("\n".join(lines), self._max_chars), meta={"hits": sum(map(len, found))})

  def rank(self, query: str, top_k: int | None = None) -> list[tuple[str, str, str]]:
    """(url, title, text) of the best pages for one query, best first."""
    top_k = top_k or self._top_k
    # Some more than asked for, because tantivy leaves the order of equal scores open.
    hits = self._searcher.search(self._query(query), 2 * top_k + 8, count=False).hits
    rows = []
    for score, address in hits:
      doc = self._searcher.doc(address)
      rows.append((-score, doc.get_first("url"), doc.get_first("title"), doc.get_first("text")))
    return [row[1:] for row in sorted(rows)[:top_k]]

  def resolve(self, session_id: str, result_id: str) -> str | None:
    """The URL behind a result id such as "r3", or None."""
    urls = self._urls.get(session_id, [])
    number = result_id[1:]
    if result_id[:1] != "r" or not (number.isascii() and number.isdigit()) or len(number) > 9:
      return None
    return urls[int(number) - 1] if 1 <= int(number) <= len(urls) else None

  def count(self, session_id: str) -> int:
    """How many result ids the session has."""
    return len(self._urls.get(session_id, []))

  def _query(self, text: str) -> tantivy.Query:
    query, occur = tantivy.Query, tantivy.Occur.Should
    parts = [(occur, query.const_score_query(
        query.term_query(self._schema, "key", _key(text), "basic"), _EXACT_BOOST))]
    for term in _terms(text):
      for field, boost in (("title", _TITLE_BOOST), ("text", 1.0)):
        parts.append((occur, query.boost_query(
            query.term_query(self._schema, field, term, "freq"), boost)))
    return query.boolean_query(parts)

  def _snippet(self, text: str, query: str) -> str:
    """The words around the text's first match, or its beginning; one line."""
    words = text.split()
    wanted = set(_terms(query))
    first = next((i for i, word in enumerate(words) if not wanted.isdisjoint(tokens(word))), 0)
    start = max(0, min(first - self._snippet_words // 3, len(words) - self._snippet_words))
    return clip(" ".join(words[start:start + self._snippet_words]), 40 * self._snippet_words)

  def snapshot(self, session_id: str) -> dict[str, Any] | None:
    urls = self._urls.get(session_id)
    return {"urls": list(urls)} if urls else None

  def restore(self, session_id: str, state: dict[str, Any]) -> None:
    self._urls[session_id] = list(state["urls"])

  async def close(self, session_id: str) -> None:
    self._urls.pop(session_id, None)

  async def aclose(self) -> None:
    self._urls.clear()
    self._threads.shutdown(wait=False)


def _terms(text: str) -> list[str]:
  """The distinct tokens of a query that count, in order."""
  found = list(dict.fromkeys(tokens(text)))
  return ([t for t in found if t not in _STOP_WORDS] or found)[:_MAX_TERMS]
