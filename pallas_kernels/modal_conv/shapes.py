"""Shapes of modal convolutions in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModalConvShape:
    """One layer: B rows of T steps, D channels, M modes; `documents` of random lengths in each row."""

    name: str
    batch: int
    channels: int
    length: int
    modes: int = 16
    documents: int = 1


SHAPES = (
    # Hyena-LI of StripedHyena 2 (Evo 2, 7B): 16 modes.
    ModalConvShape("evo2_7b_li_8k", 8, 4096, 8192),
    ModalConvShape("evo2_7b_li_128k", 1, 4096, 131072),
    ModalConvShape("evo2_7b_li_1m", 1, 4096, 1_048_576),
    # The width of the first Hyena models.
    ModalConvShape("d768_8k", 64, 768, 8192),
    ModalConvShape("d768_64k", 8, 768, 65536),
    ModalConvShape("d768_1m", 1, 768, 1_048_576),
    ModalConvShape("d256_4m", 1, 256, 4_194_304),
    # Rows that fill no tile and no chunk.
    ModalConvShape("d768_8191", 64, 768, 8191),
    ModalConvShape("d768_131071", 4, 768, 131_071),
    ModalConvShape("d768_128k", 4, 768, 131_072),
    # Packed rows.
    ModalConvShape("d768_8k_packed", 64, 768, 8192, documents=8),
    # The latent stack of the `books` recipe, with more rows on a device, and with shorter ones.
    ModalConvShape("books", 8, 1024, 2048),
    ModalConvShape("books_b32", 32, 1024, 2048),
    ModalConvShape("books_1k", 8, 1024, 1024),
    ModalConvShape("books_2047", 8, 1024, 2047),
    # Decoding.
    ModalConvShape("evo2_7b_li_decode", 32, 4096, 1),
)
