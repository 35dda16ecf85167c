"""What the code can say: its error classes, and the texts of its messages.

Pure functions over source text. A message in the docs is compared word by word with the strings of
the code. Both have gaps, `...` or a number in the docs and `{step}` in an f-string, which stand for
any words.

    sources -> error_classes, phrases -> test_troubleshooting: one entry each, and no entry of the past
"""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

GAP = "*"
_ERROR = re.compile(r"(Error|Exception|Warning|Exit|Interrupt)$")
_WORD = re.compile(r"\*|[A-Za-z_][\w-]*")
# What the docs write for a value: a number, a single capital, dots, or text between angle brackets.
_VALUE = re.compile(r"\.\.\.|<\w+>|\b\d[\d.,]*\b|\b[A-Z]\b")


def error_classes(sources: Iterable[str]) -> set[str]:
    """The names of all classes that derive, over however many steps, from an exception of Python."""
    bases: dict[str, list[str]] = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    found: set[str] = set()
    while True:
        more = {
            name
            for name, parents in bases.items()
            if any(parent in found or _ERROR.search(parent) for parent in parents)
        }
        if more == found:
            return found
        found = more


def phrases(source: str) -> Iterator[list[str]]:
    """The words of each string of ``source``, with a gap for each value of an f-string; no docstrings."""
    tree = ast.parse(source)
    unsaid = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            unsaid |= {id(part) for part in node.values}
            parts = [
                str(part.value) if isinstance(part, ast.Constant) else f" {GAP} "
                for part in node.values
            ]
            yield _WORD.findall("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in unsaid:
                yield _WORD.findall(node.value.replace(GAP, " "))


def words_of(message: str) -> list[str]:
    """The words of a message in the docs, with a gap for each value."""
    return _WORD.findall(_VALUE.sub(f" {GAP} ", message.replace(GAP, " ")))


def is_said(message: Sequence[str], phrase: Sequence[str]) -> bool:
    """Whether ``phrase`` says more than half of the words of ``message``, literally and in order.

    Not all of them, because a message may be put together from several strings.
    """
    if len(set(message) & set(phrase) - {GAP}) == 0:
        return False  # Says no to nearly all, at once.
    return 2 * _words_in_common(message, phrase) > sum(word != GAP for word in message)


def _words_in_common(message: Sequence[str], phrase: Sequence[str]) -> int:
    """The most words that a stretch of ``message`` and one of ``phrase`` share, gaps filled at will.

    ``row[i]`` is that number for stretches that end with word i of the message and with the present
    word of the phrase; 0 where neither has begun.
    """
    row = [0] * (len(message) + 1)
    best = 0
    for word in phrase:
        before, row = row, [0] * (len(message) + 1)
        for i, asked in enumerate(message):
            if asked == GAP:
                row[i + 1] = max(before[i], before[i + 1], row[i])
            elif asked == word:
                row[i + 1] = before[i] + 1
        if word == GAP:
            most = 0  # It stands for any number of words of the message.
            for i, number in enumerate(before):
                most = max(most, number)
                row[i] = max(row[i], most)
        best = max(best, *row)
    return best
