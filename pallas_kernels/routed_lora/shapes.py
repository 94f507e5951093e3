"""Shapes of adapters in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RoutedLoraShape:
    """B rows of T tokens, width K, to `sites` of width N each, rank r, codes of `chunk` tokens and `blocks` numbers.

    `active` numbers of each code are not 0; None for all, in calls without `active`. `channels_first` is the op's.
    """

    name: str
    batch: int
    length: int
    inputs: int
    outputs: int
    sites: int = 1
    rank: int = 16
    chunk: int = 1
    blocks: int = 16
    active: int | None = None
    channels_first: bool = False


SHAPES = (
    # Q, K and V of Llama 7B (2302.13971), and its output projection.
    RoutedLoraShape("llama_7b_qkv", 4, 4096, 4096, 4096, 3),
    RoutedLoraShape("llama_7b_qkv_r64", 4, 4096, 4096, 4096, 3, 64, 1, 64),
    RoutedLoraShape("llama_7b_out", 4, 4096, 4096, 4096),
    RoutedLoraShape("llama_7b_out_r64", 4, 4096, 4096, 4096, 1, 64, 1, 64),
    # Q, K and V of a byte model of width 1,024.
    RoutedLoraShape("d1024_qkv_64k", 8, 8192, 1024, 1024, 3),
    # What a Hyena of that width convolves, channel-major.
    RoutedLoraShape("hyena_d1024_64k", 8, 8192, 1024, 3072, channels_first=True),
    # A row has one of 32 adapters of rank 16.
    RoutedLoraShape("llama_7b_rows", 32, 512, 4096, 4096, 3, 512, 512, 32, 1),
    # A bank of ten experts of rank 64, of which a tile of 256 tokens takes one, five or nine.
    RoutedLoraShape("llama_7b_bank_10", 4, 4096, 4096, 4096, 3, 640, 256, 10, 1),
    RoutedLoraShape("llama_7b_bank_50", 4, 4096, 4096, 4096, 3, 640, 256, 10, 5),
    RoutedLoraShape("llama_7b_bank_90", 4, 4096, 4096, 4096, 3, 640, 256, 10, 9),
    # A bank of eight experts with a code a chunk, on the base of the recipe `books_512`.
    RoutedLoraShape("books_512_bank", 8, 4096, 512, 512, 3, 32, 64, 8),
)
