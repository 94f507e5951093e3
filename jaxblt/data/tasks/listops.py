"""ListOps: nested operations on lists of digits (Nangia, Bowman 2018), as in Long Range Arena (2011.04006, sec. 2.1).

An expression is a sequence of symbols: the digits 0..9, the operators that open a list, and "]" that closes it. The
brackets of the released files' text only repeat that structure, and are dropped, as Long Range Arena does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jaxblt.data.draws import Draws
from jaxblt.data.examples import Example, question_and_answer
from jaxblt.data.tasks.generated import GeneratedTask, ids, vocab_size
from jaxblt.validation import check_bounds

SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
"""Symbol k has id k + 4."""
CLOSE = SYMBOLS.index("]")
OPERATORS = range(10, CLOSE)
_NUMBER_OF = {text: number for number, text in enumerate(SYMBOLS)}
MOST_DRAWN = 1_000_000
"""Expressions drawn for one that is kept: of the arena's lengths one in 12 is."""
_DIGIT_SHARE = 0.75
_BATCH = 512


def parse(text: str) -> list[int]:
    """Parse an expression such as "( ( ( [MAX 2 ) 9 ) ] )"; round brackets are dropped.

    Raises:
      ValueError: a word is no symbol.
    """
    words = [word for word in text.split() if word not in ("(", ")")]
    wrong = [word for word in words if word not in _NUMBER_OF]
    if wrong:
        raise ValueError(f"{wrong[0]!r:.40} is no symbol of ListOps: expected one of {' '.join(SYMBOLS)} ( )")
    return [_NUMBER_OF[word] for word in words]


def evaluate(symbols: Sequence[int]) -> int:
    """Return the digit that an expression evaluates to.

    MED is the median, truncated where it lies between two digits; SM is the sum modulo 10.

    Raises:
      ValueError: the brackets are not balanced, a list is empty, or there is no single expression.
    """
    stack: list[list[int]] = [[]]
    for symbol in symbols:
        if symbol in OPERATORS:
            stack.append([symbol])
        elif symbol == CLOSE and len(stack) > 1 and len(stack[-1]) > 1:
            operator, *values = stack.pop()
            stack[-1].append(_apply(operator, values))
        elif symbol < 10:
            stack[-1].append(symbol)
        else:
            raise ValueError(f"unbalanced expression: {show(symbols):.80}")
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError(f"not one whole expression: {show(symbols):.80}")
    return stack[0][0]


def _apply(operator: int, values: list[int]) -> int:
    name, ordered = SYMBOLS[operator], sorted(values)
    if name == "[MIN":
        return ordered[0]
    if name == "[MAX":
        return ordered[-1]
    if name == "[SM":
        return sum(values) % 10
    return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) // 2


def is_whole(symbols: np.ndarray) -> bool:
    """Return whether Int[q] symbols are a digit, or one balanced list without empty lists."""
    opens, closes, inside = _brackets(symbols)
    one = len(symbols) > 0 and inside[-1] == 0 and np.all(inside[:-1] > 0)
    return bool(one and not np.any(opens[:-1] & closes[1:]))


def _brackets(symbols: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which symbols open a list, which close one, and how many are open behind each."""
    opens, closes = (symbols >= OPERATORS.start) & (symbols < CLOSE), symbols == CLOSE
    return opens, closes, np.cumsum(opens) - np.cumsum(closes)


def reorder(symbols: np.ndarray, draws: Draws) -> np.ndarray:
    """Put the arguments of every operator of an Int[q] expression in random order.

    It still evaluates to the same digit. A few passes over arrays: a loop over symbols would make batches slower than a
    GPU reads them.
    """
    opens, closes, inside = _brackets(symbols)
    level = inside - opens  # of the list that it is an argument of; a bracket that closes has its operator's
    by_level = np.argsort(level, kind="stable")
    begins, ends = by_level[opens[by_level]], by_level[closes[by_level]]  # in pairs
    size = np.ones(len(symbols), np.int64)
    size[begins] = ends - begins + 1

    arguments = np.flatnonzero(~closes)
    places = level * len(symbols) + np.arange(len(symbols))
    # Number lists by level, so that sorting by number sorts by level
    around = np.searchsorted(places[begins], places[arguments] - len(symbols)) - 1
    order = np.argsort(around + draws.uniform(len(arguments)))
    arguments, around = arguments[order], around[order]
    before = np.cumsum(size[arguments]) - size[arguments]
    offset = 1 + before - before[np.searchsorted(around, around)]

    place = np.zeros(len(symbols), np.int64)
    edges = np.searchsorted(level[arguments], range(1, level.max() + 2))
    for start, stop in pairwise(edges):  # a level needs the places of that before
        here = slice(start, stop)
        place[arguments[here]] = place[begins[around[here]]] + offset[here]
    place[ends] = place[begins] + size[begins] - 1
    found = np.empty_like(symbols)
    found[place] = symbols
    return found


def show(symbols: Sequence[int]) -> str:
    """Write an expression as text, without round brackets."""
    return " ".join(SYMBOLS[s] if 0 <= s < len(SYMBOLS) else f"<{s}>" for s in symbols)


def to_example(symbols: Sequence[int]) -> Example:
    """Return an expression as a row whose answer is the digit that it evaluates to."""
    return question_and_answer(ids(np.array(symbols)), ids(np.array([evaluate(symbols)])))


@dataclass(frozen=True, kw_only=True)
class ListOps(GeneratedTask):
    """Expressions drawn as Long Range Arena draws them.

    A node at a depth below `max_depth` is a digit with probability 3/4, else one of four operators with 2 to `max_args`
    arguments. At `max_depth` it is a digit. Expressions of other lengths are drawn again. The defaults are those of the
    arena, which keeps lengths between 500 and 2,000 and trains on 96,000 expressions.

    Attributes:
      max_depth: nested lists, a digit at the bottom included.
      max_args: the most arguments of an operator.
      min_symbols, max_symbols: lengths that are kept.
    """

    max_depth: int = 10
    max_args: int = 10
    min_symbols: int = 501
    max_symbols: int = 1999

    num_answers = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "max_depth", least=2)
        check_bounds(self, "max_args", least=2)
        check_bounds(self, "min_symbols", least=4, most="max_symbols")
        check_bounds(self, "max_symbols", least=4)
        longest = 1
        for _ in range(self.max_depth - 1):
            longest = min(2 + self.max_args * longest, self.max_symbols)
        if self.min_symbols > longest:
            raise ValueError(
                f"ListOps.min_symbols must be at most {longest}, the longest expression of max_depth = "
                f"{self.max_depth} and max_args = {self.max_args}, got {self.min_symbols}"
            )

    @property
    def vocab_size(self) -> int:
        return vocab_size(len(SYMBOLS))

    @property
    def length(self) -> int:
        return self.max_symbols + 2

    def draw(self, draws: Draws) -> Example:
        return to_example(self.expression(draws))

    def expression(self, draws: Draws) -> list[int]:
        """Return the symbols of an expression of a length that is kept.

        Raises:
          ValueError: none of many that were drawn has such a length.
        """
        numbers = _stream(draws)
        for _ in range(MOST_DRAWN):
            symbols = self._node(numbers)
            if self.min_symbols <= len(symbols) <= self.max_symbols:
                return symbols
        raise ValueError(
            f"no expression of {self.min_symbols}..{self.max_symbols} symbols among {MOST_DRAWN:,}: widen min_symbols "
            "and max_symbols, or change max_depth and max_args"
        )

    def _node(self, numbers) -> list[int]:
        """Return an expression of any length, cut off where it is too long to be kept."""
        symbols: list[int] = []
        left = [1]  # nodes to come in each open list; the outermost holds the root
        while left:
            if not left[-1]:
                left.pop()
                if left:
                    symbols.append(CLOSE)
                continue
            if len(symbols) > self.max_symbols:
                break
            left[-1] -= 1
            if len(left) < self.max_depth and next(numbers) >= _DIGIT_SHARE:
                symbols.append(10 + int(4 * next(numbers)))
                left.append(2 + int((self.max_args - 1) * next(numbers)))
            else:
                symbols.append(int(10 * next(numbers)))
        return symbols


def _stream(draws: Draws):
    while True:
        yield from draws.uniform(_BATCH).tolist()
