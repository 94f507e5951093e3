"""The mixers that a stack's pattern may name without a config of its own."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from flax.core import FrozenDict

from jaxblt.mixers import (
    AttentionConfig,
    DualDecayConfig,
    ExplicitFilter,
    GatedDeltaNetConfig,
    GatedLinearAttentionConfig,
    GatedRecurrenceConfig,
    GRUConfig,
    HyenaConfig,
    LSTMConfig,
    MACConfig,
    MAGConfig,
    Mamba2Config,
    NeuralMemoryConfig,
    NTMConfig,
    SlotMemoryConfig,
    SparseAttentionConfig,
    StateEngineConfig,
)

WINDOW = 512


class Table(FrozenDict):
    """Configs by name: a dict that does not change, with a hash, written in one line."""

    def __repr__(self) -> str:
        return repr(dict(self))


WORDS: Mapping[str, Any] = Table(
    {
        "hyena": HyenaConfig(dim=64),
        "hyena_short": HyenaConfig(dim=64, filter=ExplicitFilter(taps=7)),
        "hyena_medium": HyenaConfig(dim=64, filter=ExplicitFilter(taps=128)),
        "attention": AttentionConfig(dim=64),
        "window": AttentionConfig(dim=64, window=WINDOW),
        "sparse_attention": SparseAttentionConfig(dim=64),
        "recurrence": GatedRecurrenceConfig(dim=64),
        "minlstm": GatedRecurrenceConfig(dim=64, cell="minlstm"),
        "gru": GRUConfig(dim=64),
        "lstm": LSTMConfig(dim=64),
        "gated_delta_net": GatedDeltaNetConfig(dim=64),
        "gated_linear_attention": GatedLinearAttentionConfig(dim=64),
        "mamba2": Mamba2Config(dim=64),
        "dual_decay": DualDecayConfig(dim=64),
        "state_engine": StateEngineConfig(dim=64),
        "neural_memory": NeuralMemoryConfig(dim=64),
        "mag": MAGConfig(dim=64),
        "mac": MACConfig(dim=64),
    }
)
"""Built-in mixers. Experimental ones (slot memory, NTM) are named by their config in `mixers=`."""

SHORT_FORMS = {"H": "hyena", "A": "attention", "W": "window"}
"""Letters that stand for words."""

OLD_LETTERS = {
    "S": "hyena_short",
    "M": "hyena_medium",
    "R": "recurrence",
    "P": "minlstm",
    "U": "gru",
    "L": "lstm",
    "D": "gated_delta_net",
    "G": "gated_linear_attention",
    "2": "mamba2",
    "E": "dual_decay",
    "T": "state_engine",
    "K": "neural_memory",
    "J": "mag",
    "C": "mac",
}
"""Letters of stored runs; new patterns write the words."""

STORED: Mapping[str, Any] = Table(
    {
        **{letter: WORDS[word] for letter, word in OLD_LETTERS.items()},
        "N": NTMConfig(dim=64),
        "B": SlotMemoryConfig(dim=64),
    }
)
"""What letters meant in stored runs without a config for them, which `StackConfig.upgrade` reads."""

BUILT_IN: Mapping[str, Any] = Table({**WORDS, **{c: WORDS[word] for c, word in SHORT_FORMS.items()}})
"""Configs of all names that a pattern may use without `mixers`."""


def split_words(pattern: str | tuple[str, ...], known: Iterable[str]) -> str | tuple[str, ...]:
    """Return a pattern's names: of a string its letters, or words behind commas, or the one word that it is."""
    if isinstance(pattern, str) and len(pattern) > 1 and ("," in pattern or pattern in {*known, *WORDS}):
        return tuple(word.strip() for word in pattern.split(","))
    return pattern


def find_mixer(name: str, mixers: Mapping[str, Any]) -> Any:
    """Return the config of a known name: of `mixers`, where a word and its short form are one, or built-in."""
    words = {**SHORT_FORMS, **{word: letter for letter, word in SHORT_FORMS.items()}}
    other = words.get(name, name)
    return mixers.get(name) or mixers.get(other) or BUILT_IN[name]


def check_names(pattern: str | tuple[str, ...], mixers: Mapping[str, Any]) -> None:
    """Raise ValueError, with the name that may be meant, for a pattern that names an unknown mixer."""
    unknown = sorted({name for name in pattern if name not in mixers and name not in BUILT_IN})
    if not unknown:
        return
    known, name = sorted({*WORDS, *SHORT_FORMS, *mixers}), unknown[0]
    found = [OLD_LETTERS[name]] if name in OLD_LETTERS else difflib.get_close_matches(name, known, n=1)
    if name in STORED and not found:
        kind = type(STORED[name]).__name__
        fix = f"an experimental mixer is named by its config, such as mixers={{{name!r}: {kind}(dim=...)}}"
    elif found:
        fix = f"write {found[0]!r}, or add a config to `mixers`"
    else:
        fix = "add a config to `mixers`"
    raise ValueError(f"pattern {pattern!r} names {unknown}, expected names of {known}: {fix}")
