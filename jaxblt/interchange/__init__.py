"""Runs as files of other formats, and models of other libraries as runs.

- `write_run`, `read_run`: parameters and recipe as one safetensors file, and back to a run folder.
- `make_score_program`, `make_embed_program`, `write_program`, `read_program`: what a run answers as StableHLO.
- `write_executables`, `read_executables`: such a program as XLA has compiled it for one kind of device.
- `read_evo2`, `write_evo2`: checkpoints of Evo 2.
- `read_hyena_dna`, `write_hyena_dna`: checkpoints of HyenaDNA.
- `read_hf_blt`, `write_hf_blt`: Hugging Face's `BltForCausalLM`; `read_patcher` reads its entropy model alone.

Checkpoints of a run that trains are in `jaxblt.training.stored.checkpoint`. Nothing here trains.
"""

from jaxblt.interchange.evo2_run import read_evo2, write_evo2
from jaxblt.interchange.executables import Executables, read_executables, write_executables
from jaxblt.interchange.hf_blt import read_hf_blt, read_patcher, write_hf_blt
from jaxblt.interchange.hyena_dna import read_hyena_dna, write_hyena_dna
from jaxblt.interchange.program_file import Program, read_program, write_program
from jaxblt.interchange.programs import make_embed_program, make_score_program
from jaxblt.interchange.runs import read_run, write_run

__all__ = [
    "Executables",
    "Program",
    "make_embed_program",
    "make_score_program",
    "read_evo2",
    "read_executables",
    "read_hf_blt",
    "read_hyena_dna",
    "read_patcher",
    "read_program",
    "read_run",
    "write_evo2",
    "write_executables",
    "write_hf_blt",
    "write_hyena_dna",
    "write_program",
    "write_run",
]
