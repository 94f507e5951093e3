"""The properties: each returns what a layer gave and what it should have given.

A property is given by name what its arguments ask for: the layer's `call`, `start` and `reference`; `x` [B, T, D] in
fp32, `cut` in 1..T-1, `decays`, `dtype`; and functions of `helpers`. Scripts of findings show its lines as they are.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Property:
    """One thing that must hold of a layer that promises it.

    Attributes:
      check: returns (actual, expected), two arrays or two texts.
      needs: the promises that it is about.
      rows: of its inputs.
      differenced: expected is a difference quotient.
    """

    check: Callable[..., tuple[Any, Any]]
    needs: frozenset[str]
    rows: int = 1
    differenced: bool = False

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.check.__name__


def future(call: Any, x: np.ndarray, cut: int) -> tuple[Any, Any]:
    """Change the tokens from `cut` on: outputs before them stay."""
    changed = x.copy()
    changed[:, cut:] += 2
    return call(changed)[0][:, :cut], call(x)[0][:, :cut]


def shorter(call: Any, x: np.ndarray, cut: int) -> tuple[Any, Any]:
    """Cut a row: what is left gives what it gave."""
    return call(x[:, :cut])[0], call(x)[0][:, :cut]


def batch(call: Any, x: np.ndarray) -> tuple[Any, Any]:
    """Read a row with another one and alone."""
    return call(x)[0][1:], call(x[1:])[0]


def packed_first(call: Any, x: np.ndarray, cut: int) -> tuple[Any, Any]:
    """Read a document before another one in a row, and alone."""
    documents = 1 + (np.arange(x.shape[1]) >= cut)[None]
    return call(x, documents)[0][:, :cut], call(x[:, :cut])[0]


def packed(call: Any, x: np.ndarray, cut: int) -> tuple[Any, Any]:
    """Read a document behind another one in a row, and alone."""
    documents = 1 + (np.arange(x.shape[1]) >= cut)[None]
    return call(x, documents)[0][:, cut:], call(x[:, cut:])[0]


def packed_gradients(call: Any, gradient: Any, x: np.ndarray, cut: int) -> tuple[Any, Any]:
    """Read a document behind another one in a row, and alone: gradients by both."""
    documents = 1 + (np.arange(x.shape[1]) >= cut)[None]
    alone = gradient(lambda x: call(x)[0], x[:, cut:])
    return gradient(lambda x: call(x, documents)[0][:, cut:], x), np.pad(alone, ((0, 0), (cut, 0), (0, 0)))


def padding(call: Any, x: np.ndarray, cut: int) -> tuple[Any, Any]:
    """Put 100 at padding behind a row."""
    documents = 1 * (np.arange(x.shape[1]) < cut)[None]
    filled = np.where(documents[..., None], x, np.float32(100))
    return call(filled, documents)[0][:, :cut], call(x[:, :cut])[0]


def left_padding(call: Any, x: np.ndarray, cut: int) -> tuple[Any, Any]:
    """Put 100 at padding before a row."""
    documents = 1 * (np.arange(x.shape[1]) >= cut)[None]
    filled = np.where(documents[..., None], x, np.float32(100))
    return call(filled, documents)[0][:, cut:], call(x[:, cut:])[0]


def nan_padding(call: Any, x: np.ndarray, cut: int) -> tuple[Any, Any]:
    """Put NaN at padding behind a row."""
    documents = 1 * (np.arange(x.shape[1]) < cut)[None]
    filled = np.where(documents[..., None], x, np.float32(np.nan))
    return call(filled, documents)[0][:, :cut], call(x[:, :cut])[0]


def nan_gradients(call: Any, gradient: Any, x: np.ndarray, cut: int) -> tuple[Any, Any]:
    """Put NaN at padding behind a row: gradients by its tokens stay, and those by padding are 0."""
    documents = 1 * (np.arange(x.shape[1]) < cut)[None]
    filled = np.where(documents[..., None], x, np.float32(np.nan))
    alone = gradient(lambda x: call(x)[0], x[:, :cut])
    after = ((0, 0), (0, x.shape[1] - cut), (0, 0))
    return gradient(lambda x: call(x, documents)[0][:, :cut], filled), np.pad(alone, after)


def step(call: Any, start: Any, x: np.ndarray) -> tuple[Any, Any]:
    """Read a row token by token."""
    y, state = None, start(len(x))
    for t in range(x.shape[1]):
        y, state = call(x[:, t : t + 1], state=state)
    return y, call(x)[0][:, -1:]


def prefill(call: Any, start: Any, x: np.ndarray, cut: int) -> tuple[Any, Any]:
    """Read `cut` tokens in one call, and one token more."""
    _, state = call(x[:, :cut], state=start(len(x)))
    return call(x[:, cut : cut + 1], state=state)[0], call(x)[0][:, cut : cut + 1]


def split(call: Any, start: Any, x: np.ndarray, cut: int) -> tuple[Any, Any]:
    """Read a row in two calls."""
    _, state = call(x[:, :cut], state=start(len(x)))
    return call(x[:, cut:], state=state)[0], call(x)[0][:, cut:]


def reused_state(call: Any, start: Any, x: np.ndarray, cut: int) -> tuple[Any, Any]:
    """Read a token twice from one state."""
    _, state = call(x[:, :cut], state=start(len(x)))
    first = call(x[:, cut : cut + 1], state=state)[0]
    return call(x[:, cut : cut + 1], state=state)[0], first


def steady_state(call: Any, start: Any, form: Any, x: np.ndarray, cut: int) -> tuple[str, str]:
    """Compare dtypes and shapes of the state behind one call and behind two."""
    _, once = call(x[:, :cut], state=start(len(x)))
    before = str(form(once))
    _, twice = call(x[:, cut : cut + 1], state=once)
    return str(form(twice)), before


def document_in_second_call(call: Any, start: Any, x: np.ndarray, cut: int) -> tuple[Any, Any]:
    """Begin a document with the second call, and alone."""
    documents = 1 + (np.arange(x.shape[1]) >= cut)[None]
    _, state = call(x[:, :cut], documents[:, :cut], start(len(x)))
    return call(x[:, cut:], documents[:, cut:], state)[0], call(x[:, cut:])[0]


def padding_before_a_call(call: Any, start: Any, x: np.ndarray, cut: int) -> tuple[Any, Any]:
    """Put padding behind the tokens of a call: the next call goes on from the tokens."""
    documents = 1 * (np.arange(x.shape[1]) < cut)[None]
    filled = np.where(documents[..., None], x, np.float32(100))
    _, state = call(filled, documents, start(len(x)))
    token = x[:, cut : cut + 1]
    return call(token, np.ones((1, 1), int), state)[0], call(x[:, : cut + 1])[0][:, cut:]


def large_decays(call: Any, x: np.ndarray, decays: slice) -> tuple[Any, Any]:
    """Make all decays exp(-30): each token gives what it gives in a row of its own."""
    strong = x.copy()
    strong[..., decays] = 30
    return call(strong)[0][0], call(strong.reshape(-1, 1, x.shape[2]))[0][:, 0]


def one_large_decay(call: Any, x: np.ndarray, cut: int, decays: slice) -> tuple[Any, Any]:
    """Make the decays of one token exp(-30): the row from there on gives what it gives alone."""
    strong = x.copy()
    strong[:, cut, decays] = 30
    return call(strong)[0][:, cut:], call(strong[:, cut:])[0]


def large_decay_gradients(call: Any, gradient: Any, x: np.ndarray, decays: slice) -> tuple[Any, Any]:
    """Make all decays exp(-30): the last token has the gradient that it has alone."""
    strong = x.copy()
    strong[..., decays] = 30
    found = gradient(lambda x: call(x)[0][:, -1:], strong)[:, -1:]
    return found, gradient(lambda x: call(x)[0], strong[:, -1:])


def finite_gradients(call: Any, gradient: Any, x: np.ndarray) -> tuple[Any, Any]:
    """Take gradients at inputs of 0: they are finite."""
    found = gradient(lambda x: call(x)[0], np.zeros_like(x))
    return found, np.nan_to_num(found)


def gradients(
    call: Any, gradient: Any, reference: Any, host: Any, x: np.ndarray, steps: Any
) -> tuple[Any, Any]:
    """Compare the gradient, along itself and along a random direction, with differences of the reference.

    The step that agrees best counts, as in `jaxblt.testing.numerics`: a wrong gradient agrees with none.
    """
    found = gradient(lambda x: call(x)[0], x)
    size, actual, expected = np.linalg.norm(found), [], []
    for d in (found / size, np.random.default_rng(1).standard_normal(x.shape)):
        value = lambda h, d=d: (host(reference(x + h * d)) ** 3).sum() / size  # noqa: E731
        slopes = [(8 * (value(h) - value(-h)) - value(2 * h) + value(-2 * h)) / (12 * h) for h in steps]
        actual.append((found * d).sum() / size)
        expected.append(min(slopes, key=lambda slope: abs(slope - actual[-1])))
    return np.array(actual), np.array(expected)


def dtype_kept(call: Any, x: np.ndarray, dtype: str) -> tuple[str, str]:
    """Compare the dtype of outputs with that of inputs."""
    return str(call(x)[0].dtype).rpartition(".")[2], dtype


def values(call: Any, reference: Any, host: Any, x: np.ndarray) -> tuple[Any, Any]:
    """Compare outputs with those of the reference in f64."""
    return host(call(x)[0]), host(reference(x.astype(np.float64)))


def _of(check: Callable[..., tuple[Any, Any]], needs: str, **more: Any) -> Property:
    return Property(check, frozenset(needs.split()), **more)


PROPERTIES: dict[str, Property] = {
    found.name: found
    for found in (
        _of(values, "values"),
        _of(future, "causal"),
        _of(shorter, "causal lengths"),
        _of(batch, "batch", rows=2),
        _of(packed_first, "documents"),
        _of(packed, "documents"),
        _of(packed_gradients, "documents gradients"),
        _of(padding, "padding"),
        _of(left_padding, "left_padding"),
        _of(nan_padding, "nan"),
        _of(nan_gradients, "nan gradients"),
        _of(step, "state"),
        _of(prefill, "state"),
        _of(split, "any_split"),
        _of(document_in_second_call, "documents_in_calls"),
        _of(padding_before_a_call, "documents_in_calls padding"),
        _of(reused_state, "pure_state"),
        _of(steady_state, "steady_state"),
        _of(large_decays, "decays"),
        _of(one_large_decay, "decays"),
        _of(large_decay_gradients, "decays gradients"),
        _of(finite_gradients, "gradients"),
        _of(gradients, "gradients", differenced=True),
        _of(dtype_kept, "dtype"),
    )
}
"""The properties by name, in the order of the table."""
