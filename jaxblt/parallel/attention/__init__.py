"""Exact attention over a sequence that is split along the mesh axis `seq`; see README.md beside this file."""

from jaxblt.parallel.attention.context import ContextParallel, Implementation, context_attention

__all__ = ["ContextParallel", "Implementation", "context_attention"]
