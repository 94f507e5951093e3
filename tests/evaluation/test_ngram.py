"""The n-gram model against a dictionary version of its formula, and on sources of known entropy."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from jaxblt.evaluation import NgramModel, fit_ngram

TEXT = (b"the cat sat on the mat; the dog sat on the log; a cat and a dog met at the mat. " * 3)[
    :-17
] + bytes(np.random.default_rng(0).integers(97, 101, 300, dtype=np.uint8))


def _naive_levels(
    data: bytes, order: int
) -> list[tuple[dict[bytes, float], dict[bytes, tuple[float, float]]]]:
    counts = Counter(data[i - order : i + 1] for i in range(order, len(data)))
    levels = []
    for _ in range(order + 1):
        n = Counter(min(count, 5) for count in counts.values())
        discount = {1: 0.5, 2: 0.5, 3: 0.5}
        for k in (1, 2, 3):
            if n[1] > 0 and n[k] > 0:
                d = k - (k + 1) * n[1] / (n[1] + 2 * n[2]) * n[k + 1] / n[k]
                discount[k] = d if d > 0 else 0.5
        kept, total, spare = {}, defaultdict(float), defaultdict(float)
        for gram, count in counts.items():
            d = discount[min(count, 3)]
            kept[gram] = count - d
            total[gram[:-1]] += count
            spare[gram[:-1]] += d
        levels.append((kept, {c: (total[c], spare[c]) for c in total}))
        counts = Counter(gram[1:] for gram in counts if len(gram) > 1)
    return levels[::-1]


def _naive(levels: list, context: bytes, byte: int) -> float:
    p = 1 / 256
    for length, (kept, contexts) in enumerate(levels):
        recent = context[len(context) - length :]
        if length > len(context) or recent not in contexts:
            break
        total, spare = contexts[recent]
        p = (kept.get(recent + bytes([byte]), 0.0) + spare * p) / total
    return p


@pytest.fixture(scope="module")
def model() -> NgramModel:
    return fit_ngram(TEXT, order=3)


@pytest.mark.parametrize("order", [0, 1, 3])
def test_bits_equal_the_formula_written_with_dictionaries(order: int) -> None:
    levels = _naive_levels(TEXT, order)
    held_out = b"a dog and the cat sat at Zo\xffe the the log; dab"
    contexts = [held_out[max(0, i - order) : i] for i in range(len(held_out))]
    expected = [-np.log2(_naive(levels, c, b)) for c, b in zip(contexts, held_out, strict=True)]
    np.testing.assert_allclose(fit_ngram(TEXT, order=order).bits(held_out), expected, rtol=1e-12)


@pytest.mark.parametrize("context", [b"", b"t", b"th", b"the", b"on the", b"Qqq", b"\x00\x00\x00", b"\xffhe"])
def test_probabilities_are_positive_and_sum_to_one(model: NgramModel, context: bytes) -> None:
    p = model.distribution(context)
    assert p.min() > 0
    assert p.sum() == pytest.approx(1.0, abs=1e-12)


def test_distribution_and_bits_agree_and_chunks_change_nothing(model: NgramModel) -> None:
    data = b"the cat met the dog; zzz"
    apart = [-np.log2(model.distribution(data[:i])[byte]) for i, byte in enumerate(data)]
    np.testing.assert_allclose(model.bits(data), apart, rtol=1e-12)
    for chunk in (1, 5, 24):
        np.testing.assert_array_equal(model.bits(data, chunk=chunk), model.bits(data))
    assert model.bits_per_byte(data) == pytest.approx(np.mean(apart))


@pytest.mark.parametrize("order", [1, 3, 7])
def test_a_source_that_the_last_k_bytes_determine_costs_nothing(order: int) -> None:
    """A de Bruijn-like walk: next = f(last k bytes), seen often enough; order k - 1 cannot tell."""
    rng = np.random.default_rng(order)
    rule: dict[bytes, int] = {}
    walk = bytearray(rng.integers(0, 4, order, dtype=np.uint8).tobytes())
    for _ in range(30_000):
        walk.append(rule.setdefault(bytes(walk[-order:]), int(rng.integers(0, 4))))
    train, held_out = bytes(walk[:20_000]), bytes(walk[20_000:])
    assert fit_ngram(train, order=order).bits_per_byte(held_out) < 0.02


def test_a_markov_source_reaches_its_entropy_at_its_order_and_not_below() -> None:
    """x_t = x_{t-2} + noise mod 5: order 0 and 1 see 5 even symbols, order 2 sees the noise alone."""
    rng = np.random.default_rng(1)
    noise = rng.choice(5, size=200_000, p=[0.7, 0.1, 0.1, 0.05, 0.05])
    x = np.zeros(noise.size, np.uint8)
    for t in range(2, x.size):
        x[t] = (x[t - 2] + noise[t]) % 5
    train, held_out = x[:160_000].tobytes(), x[160_000:].tobytes()
    p = np.array([0.7, 0.1, 0.1, 0.05, 0.05])
    entropy = float(-(p * np.log2(p)).sum())
    assert fit_ngram(train, order=1).bits_per_byte(held_out) == pytest.approx(np.log2(5), abs=0.01)
    for order in (2, 3):
        assert fit_ngram(train, order=order).bits_per_byte(held_out) == pytest.approx(entropy, abs=0.02)


def test_random_bytes_cost_eight_bits() -> None:
    rng = np.random.default_rng(2)
    train, held_out = rng.bytes(400_000), rng.bytes(50_000)
    assert fit_ngram(train, order=0).bits_per_byte(held_out) == pytest.approx(8.0, abs=0.005)
    for order in (1, 2, 5):  # 65,536 contexts and bytes to estimate from 400,000: 0.12 bits of regret
        assert 7.99 < fit_ngram(train, order=order).bits_per_byte(held_out) < 8.13


def test_bad_requests_say_what_was_expected(model: NgramModel) -> None:
    with pytest.raises(ValueError, match=r"0\.\.7, got 8"):
        fit_ngram(TEXT, order=8)
    with pytest.raises(ValueError, match="more than 3 bytes, got 3"):
        fit_ngram(b"abc", order=3)
    with pytest.raises(ValueError, match="data is empty"):
        model.bits_per_byte(b"")
