"""The config of a patcher: one frozen dataclass for every mode, checked when it is made."""

from dataclasses import dataclass
from typing import Any, Literal

from jaxblt.validation import check_bounds, check_fields, check_read

Mode = Literal["entropy", "greedy", "space", "static", "byte", "learned", "optimal", "length_constrained"]
"""The rule that cuts bytes into patches; `PatcherConfig` says what each does."""


@dataclass(frozen=True, kw_only=True)
class PatcherConfig:
    """The rule that groups bytes into patches (Byte Latent Transformer, 2412.09871, sec. 2.3).

    H_t is the entropy of the prediction made at byte t (of byte t + 1). The patch of byte t ends there if

      entropy             H_t > threshold; or t is its document's first byte (patches start at 0 and 1)
        monotonic         H_t - H_{t-1} > threshold
        threshold_add     H_t > threshold, H_t - H_{t-1} > threshold_add, and byte t - 1 did not end a patch
      greedy              the sum of H from the patch's first byte to t exceeds threshold
      space               byte t is neither an ASCII letter or digit nor part of a multi-byte UTF-8 character
      static              t + 1 is a multiple of patch_size
      byte                always
      learned             p_t > 1/2, p of the model's own router; or t is its document's first byte
      optimal             chosen so that the sum of C(patch) over the block is least (not causal)
      length_constrained  the same among segmentations in exactly num_patches patches (not causal)

    where C([i, j)) = patch_cost + sum over i <= t <= j - 2 of max(0, H_t - threshold). That is a cost per patch plus
    the surprise of each byte after the first. Patches never cross the edge of a block; offsets count from it.

    Attributes:
      mode: the rule. All except the last two are causal: they read bytes and entropies only up to t.
      threshold: in nats. It has no default: `calibrate_threshold` finds it for a number of bytes per patch.
      threshold_add: in nats; if it is not None the dual rule is used.
      monotonic: compare the rise of the entropy with the threshold, not the entropy.
      patch_size: length of patches in bytes, in mode static.
      patch_cost: nats per patch, in the cost that optimal and length_constrained minimise.
      num_patches: number of patches in a full block, in mode length_constrained.
      min_length: the least bytes of a patch, except the last of a block: earlier boundaries are refused.
      max_length: the most bytes of a patch: it ends there. None sets no limit except the block.
      block_size: number of bytes in a block.
      capacity: number of patch slots in a block, from `calibrate_capacity`; None for the least that cannot overflow.
      margin: distance in nats between the threshold and the nearest entropy of the calibration sample (see
        `threshold_margin`). Smaller rounding errors move no boundary of the sample. None if not known.
      target: mean length in bytes that the ratio loss aims at, in mode learned; a recipe fills in its
        `bytes_per_patch`.
      reads_entropies: whether the router reads entropies, in mode learned; a recipe fills it in.
      entropy_context: the most earlier bytes that the entropy model may see: as many as in its training rows; an even
        number (see `jaxblt.patching.contexts`). None sets no limit besides the model's own windows.

    Raises:
      ValueError: an option is out of range, or does not belong to the mode.
    """

    mode: Mode = "entropy"
    threshold: float | None = None
    threshold_add: float | None = None
    monotonic: bool = False
    patch_size: int = 4
    patch_cost: float = 1.0
    num_patches: int | None = None
    min_length: int = 1
    max_length: int | None = None
    block_size: int = 4096
    capacity: int | None = None
    margin: float | None = None
    target: float | None = None
    reads_entropies: bool = False
    entropy_context: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "margin", least=0)
        check_bounds(self, "entropy_context", least=2)
        if self.entropy_context is not None and self.entropy_context % 2:
            raise ValueError(
                f"PatcherConfig.entropy_context must be even (windows start at its halves), got {self.entropy_context}"
            )
        self._check_lengths()
        self._check_thresholds()
        self._check_num_patches()
        self._check_target()
        self._check_read()

    def check(self, recipe: Any) -> None:
        """Check that a recipe's objective may see what the rule reads, and that the rule has what it reads."""
        kind = type(recipe.objective).__name__
        if recipe.objective.causal and not self.causal:
            raise ValueError(
                f"patcher mode {self.mode!r} looks ahead, which would leak bytes to objective {kind}: use a causal mode"
            )
        sources = (recipe.entropy_run, recipe.entropy_model, recipe.data.entropies)
        if self.needs_entropies and all(source is None for source in sources):
            raise ValueError(
                f"patcher mode {self.mode!r} needs entropies: set entropy_run to the folder of a trained entropy "
                "model, or data.entropies to a file of precomputed ones"
            )
        if self.mode == "learned" and recipe.bytes_per_patch is None:
            raise ValueError(
                "patcher mode 'learned' is led to a mean length, and bytes_per_patch is None: set it, to 4.5 for text"
            )
        if self.has_threshold and self.threshold is None and recipe.bytes_per_patch is None:
            raise ValueError(
                "the patcher has no threshold: set bytes_per_patch, the mean length to calibrate it for, or "
                "patcher.threshold in nats"
            )

    @property
    def causal(self) -> bool:
        """True if the patch of byte t is decided from what is known at t, as generation needs."""
        return self.mode not in ("optimal", "length_constrained")

    @property
    def has_threshold(self) -> bool:
        """True if the rule compares entropies with `threshold`."""
        return self.mode in ("entropy", "greedy", "optimal", "length_constrained")

    @property
    def needs_entropies(self) -> bool:
        """True if rule or router reads the entropies of an entropy model."""
        return self.has_threshold or self.reads_entropies

    @property
    def dual(self) -> bool:
        return self.threshold_add is not None

    @property
    def shortest(self) -> int:
        """Least length a boundary rule may ask for: the dual rule never ends two patches in a row."""
        return max(self.min_length, 2) if self.dual else self.min_length

    @property
    def longest(self) -> int:
        return self.block_size if self.max_length is None else self.max_length

    @property
    def slots(self) -> int:
        """Slots of a block: `capacity`, or the least number that cannot overflow."""
        if self.capacity is not None:
            return self.capacity
        if self.num_patches is not None:
            return self.num_patches
        least = self.min_length
        if self.mode == "static" and self.longest >= self.patch_size:
            least = max(least, self.patch_size)
        return -(-self.block_size // least)

    def known_threshold(self) -> float:
        """Return the threshold.

        Raises:
          ValueError: it was not set.
        """
        if self.threshold is None:
            mode = self.mode if self.causal else "entropy"
            raise ValueError(
                f"mode={self.mode!r} has no threshold, and there is no default: it depends on the entropy "
                "model. Find it with jaxblt.patching.calibrate_threshold(entropies, target_bytes_per_patch, "
                f"config=...) of mode={mode!r} and set it with dataclasses.replace(config, threshold=...)"
            )
        return self.threshold

    def _check_lengths(self) -> None:
        check_bounds(self, "block_size", "patch_size", least=1)
        check_bounds(self, "min_length", "max_length", "capacity", least=1, most="block_size")
        if self.min_length > self.longest:
            raise ValueError(f"min_length {self.min_length} exceeds max_length {self.longest}")

    def _check_thresholds(self) -> None:
        if self.mode != "entropy" and (self.monotonic or self.dual):
            raise ValueError(f"monotonic and threshold_add belong to mode='entropy', got mode={self.mode!r}")
        if self.monotonic and self.dual:
            raise ValueError("choose monotonic or threshold_add (which looks at the rise as well), not both")
        check_bounds(self, "patch_cost", least=0)
        if self.mode != "entropy":
            check_bounds(self, "threshold", least=0, why=f": nats, in mode={self.mode!r}")

    def _check_target(self) -> None:
        learned = self.mode == "learned"
        for name in ("target", "reads_entropies"):
            check_read(self, name, needed="mode='learned'", is_read=learned)
        if self.target is None:
            return
        check_bounds(self, "target", above=1, why=" (bytes_per_patch of the recipe): a router is led to it")
        if not self.min_length <= self.target <= self.longest:
            raise ValueError(
                f"target = {self.target} bytes a patch (bytes_per_patch of the recipe) lies outside the lengths that "
                f"patches may have, {self.min_length}..{self.longest}: change min_length or max_length"
            )

    def _check_read(self) -> None:
        check_read(self, "patch_size", needed="mode='static'", is_read=self.mode == "static")
        costs = "mode='optimal' or 'length_constrained'"
        check_read(self, "patch_cost", needed=costs, is_read=not self.causal)
        needed = "a mode that needs entropies"
        for name in ("threshold", "margin"):
            check_read(self, name, needed=needed, is_read=self.has_threshold)
        check_read(self, "entropy_context", needed=needed, is_read=self.needs_entropies)

    def _check_num_patches(self) -> None:
        k = self.num_patches
        if k is None and self.mode == "length_constrained":
            raise ValueError(
                "mode='length_constrained' cuts a block into num_patches patches, got None: set it, to 1024 for "
                "patches of 4 bytes in blocks of 4096"
            )
        if k is None:
            return
        if self.mode != "length_constrained":
            raise ValueError(
                f"num_patches is for mode='length_constrained' alone, got {k} with mode={self.mode!r}"
            )
        if not k * self.min_length <= self.block_size <= k * self.longest:
            raise ValueError(
                f"no way to cut {self.block_size} bytes into num_patches = {k} patches of {self.min_length}.."
                f"{self.longest} bytes: choose num_patches in {-(-self.block_size // self.longest)}.."
                f"{self.block_size // self.min_length}"
            )
        if k > self.slots:
            raise ValueError(f"num_patches {k} exceeds capacity {self.capacity}")
