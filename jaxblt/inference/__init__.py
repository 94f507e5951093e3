"""Decoding with caches, sampling and generation."""

from jaxblt.inference.beams import Beam, beam_search
from jaxblt.inference.decode import Decoder, DecoderState, decode_bytes, decode_step, init_decoder
from jaxblt.inference.drafts import DraftCounts, Drafts
from jaxblt.inference.generate import generate
from jaxblt.inference.prepare import prepare_decoding
from jaxblt.inference.prompts import prefill
from jaxblt.inference.rows import put_rows, take_rows
from jaxblt.inference.sampling import SamplingConfig, sample
from jaxblt.inference.unroll import unroll

__all__ = [
    "Beam",
    "Decoder",
    "DecoderState",
    "DraftCounts",
    "Drafts",
    "SamplingConfig",
    "beam_search",
    "decode_bytes",
    "decode_step",
    "generate",
    "init_decoder",
    "prefill",
    "prepare_decoding",
    "put_rows",
    "sample",
    "take_rows",
    "unroll",
]
