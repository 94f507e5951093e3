"""Rules that papers name, made of those in `rules.py`; `masks.CAUSAL & rule` is the form for decoders."""

from pallas_kernels.attention.rules import ByBlock, Global, Interval, RandomBlocks, Rule, Strided


def bigbird(*, block: int = 64, near: int = 1, random: int = 3, first: int = 1, seed: int = 0) -> Rule:
    """Return BigBird's rule of blocks: neighbours, random blocks, and global blocks at the start (2007.14062).

    Args:
      block: positions in a block.
      near: blocks on each side of a query's own.
      random: draws a block, as of `RandomBlocks`.
      first: global blocks.
      seed: of the draws.
    """
    local = ByBlock(Interval(near, near), block)
    return local | RandomBlocks(random, seed, block) | Global(first=first * block)


def local_global(*, before: int = 64, after: int = 63, every: int = 64) -> Rule:
    """Return an interval around the query, and every `every`-th column and row."""
    return Interval(before, after) | Global(every=every)


def longformer(*, window: int = 512, dilation: int = 1, first: int = 1) -> Rule:
    """Return half a window of keys on each side, `dilation` apart, and global tokens at the start (2004.05150)."""
    reach = window // 2 * dilation
    local = Interval(reach, reach)
    return (local & Strided(dilation) if dilation > 1 else local) | Global(first=first)
