"""The program `jaxblt`: finds a command in a table, and runs it.

A command is a row of `COMMANDS`: a function whose arguments are the options, or a `main(argv) -> int | None` that
parses them itself. A text that the function returns is printed. Its module is imported when it runs.
"""

import gc
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from jaxblt.cli.interrupts import end_quietly
from jaxblt.validation import perhaps

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("jaxblt.cli.train:main", "train a recipe, or go on with its run"),
    "finetune": ("jaxblt.cli.finetune:main", "train a run's model with a new head on labelled records"),
    "sweep": ("jaxblt.cli.sweep:main", "train a recipe with several sets of overrides, and compare"),
    "evaluate": (
        "jaxblt.cli.evaluate:evaluate",
        "bits per byte of a run on a split, and the scores of a task",
    ),
    "generate": ("jaxblt.cli.generate:generate", "continue prompts with a run"),
    "serve": ("jaxblt.cli.serve:serve", "answer clients of OpenAI's API over HTTP with a run"),
    "compile": ("jaxblt.cli.compile_run:compile_run", "compile what serve runs, so that it starts at once"),
    "score": ("jaxblt.cli.answers:score", "log-likelihood of each record of a file"),
    "embed": ("jaxblt.cli.answers:embed", "hidden states of each record of a file"),
    "index": ("jaxblt.cli.answers:index", "base vectors of a run's documents, for routers that search them"),
    "classify": ("jaxblt.cli.answers:classify", "label each record of a file with a fine-tuned run"),
    "variants": ("jaxblt.cli.answers:variants", "rate the variants of a VCF file against a genome"),
    "mutagenesis": (
        "jaxblt.cli.answers:mutagenesis",
        "rate all single substitutions of each record of a file",
    ),
    "attributions": ("jaxblt.cli.attributions:attributions", "show which bytes a run's answers rest on"),
    "patch": ("jaxblt.cli.patch:patch", "cut a file into patches, draw them, write entropies"),
    "memory": ("jaxblt.cli.memory:memory", "draw what a run's memory does under a passage"),
    "plan": ("jaxblt.cli.plan:main", "memory of a recipe's train step on a GPU that need not be here"),
    "benchmark": (
        "jaxblt.cli.benchmark:main",
        "time a recipe's train step on this machine, by remat if asked",
    ),
    "models": ("jaxblt.cli.models:models", "list the trained runs that come with jaxblt"),
    "card": ("jaxblt.cli.card:card", "write what a run is, what it was trained on and how good it is"),
    "push": ("jaxblt.cli.push:push", "upload a run and its card to the Hugging Face hub"),
    "quantize": (
        "jaxblt.cli.quantize:quantize",
        "write a run with weights in 8 or 4 bits, and what that costs",
    ),
    "export": ("jaxblt.interchange.commands:export", "write a run to one file for other programs"),
    "import": (
        "jaxblt.interchange.commands:import_run",
        "make a run folder of such a file, or of a Hugging Face model",
    ),
    "new": ("jaxblt.cli.new:new", "write a recipe file of your own to start from"),
    "data": ("jaxblt.cli.data:main", "fetch the data of the built-in recipes"),
    "demo": ("jaxblt.cli.demo:demo", "train and show everything in small, on an embedded book"),
    "conformance": ("jaxblt.cli.conformance:conformance", "check what a layer of your own promises"),
    "doctor": ("jaxblt.doctor:main", "what this machine has, and what will run on it"),
}
"""Place and description of each command."""


def main(argv: Sequence[str]) -> Any:
    """Run the command that `argv` begins with.

    Raises:
      ValueError: there is no such command.
    """
    if argv and argv[0] == "--version":
        import jaxblt

        print(f"jaxblt {jaxblt.__version__}")
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        raise ValueError(f"unknown command {name!r}{perhaps(name, COMMANDS)}, choose one of: {known}")
    return call(name, rest)


def call(name: str, argv: Sequence[str]) -> Any:
    """Run a command of the table with its options, and return its status."""
    from jaxblt.cli.parsing import parse

    module, _, function = COMMANDS[name][0].partition(":")
    found = getattr(import_module(module), function)
    told = found(argv) if function == "main" else parse(found, argv, prog=f"jaxblt {name}")
    if not isinstance(told, str):
        return told
    print(told)
    return 0


def usage() -> str:
    """Return the table of commands."""
    rows = [f"  {name:12} {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: jaxblt COMMAND [options]",
            "",
            "Models that read raw bytes over very long contexts.",
            "",
            *rows,
            "",
            "jaxblt COMMAND --help explains a command; jaxblt --version prints the version.",
            "--import MODULE (or FILE.py) with any command imports mixers, sources and tasks of your own first.",
        ]
    )


def console() -> None:
    """Run the program with the command line of its process, and exit."""
    end_quietly()
    # Keep Python's collector from looking through modules and traces again and again
    gc.set_threshold(100_000, 20, 100)
    # Import after that, so that Ctrl-C is quiet from here on
    from jaxblt.cli.parsing import run

    run(main)


if __name__ == "__main__":
    console()
