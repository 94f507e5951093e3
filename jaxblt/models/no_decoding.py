"""The part of `LanguageModel` that decodes, for models that answer with labels."""

from typing import Any, Never

from jaxtyping import Array, Int


class NoDecoding:
    """Refuses to decode: there is no next byte."""

    def init_state(self, batch_size: int, *, num_bytes: int) -> Never:
        """Refuse to decode."""
        raise ValueError(
            f"a {type(self).__name__} predicts labels and cannot generate: load a run that predicts the next byte"
        )

    def prefill(self, ids: Int[Array, "B T"], state: Any, **options: Any) -> Never:
        """Refuse, as `init_state` does."""
        self.init_state(0, num_bytes=0)

    def step(self, ids: Int[Array, "B"], state: Any, **options: Any) -> Never:
        """Refuse, as `init_state` does."""
        self.init_state(0, num_bytes=0)

    def stream(self, ids: Int[Array, "B T"], state: Any, **options: Any) -> Never:
        """Refuse, as `init_state` does."""
        self.init_state(0, num_bytes=0)

    def boundaries(self, state: Any) -> None:
        """Return None: nothing is decoded."""
