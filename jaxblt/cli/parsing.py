"""Parts that commands share: options from a command line, and errors as one line."""

import codecs
import contextlib
import errno
import functools
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import tyro

from jaxblt.cli.plugins import load_plugins, take_imports
from jaxblt.cli.variables import tell_unknown

FIXES = {
    errno.EACCES: "change its permissions, or name another",
    errno.EPERM: "change its permissions, or name another",
    errno.EROFS: "its disk is read-only; name another",
    errno.EEXIST: "it is there already; name another",
    errno.EISDIR: "it is a folder; name a file",
    errno.ENOTDIR: "a part of its path is a file; name another",
    errno.ELOOP: "its links lead in a circle; name the file itself",
    errno.ENAMETOOLONG: "choose a shorter name",
}
"""What to do about errors of the file system that name a file."""


def run(main: Callable[[Sequence[str]], Any]) -> NoReturn:
    """Call `main` with the command line and exit with the status that it returns, 0 for None.

    Before, plugins and what --import names are imported. An error that names its own fix becomes one line and exit
    status 1.
    """
    if sys.stdout is None:  # the caller closed it
        discard_output()
    replace_unknown_characters()
    tell_unknown(os.environ)
    try:
        load_plugins()
        status = main(take_imports(sys.argv[1:]))
        print(end="", flush=True)
    except KeyboardInterrupt as error:
        # Exit as shells say of a program that Ctrl-C ended
        raise SystemExit(128 + signal.SIGINT) from error
    except BrokenPipeError as error:
        # Let the reader leave, as `head` does: the interpreter would complain when it flushes at its end
        discard_output()
        raise SystemExit(1) from error
    except (ValueError, OSError, RuntimeError, ImportError, AssertionError) as error:
        if isinstance(error, AssertionError) and not _is_without_device(error):
            raise
        print(f"error: {explain(error)}", file=sys.stderr)
        raise SystemExit(1) from error
    raise SystemExit(status if isinstance(status, int) else 0)


def discard_output() -> None:
    """Let standard output lead to nowhere: nobody reads it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if sys.stdout is None:
        sys.stdout = os.fdopen(nowhere, "w")
    else:
        os.dup2(nowhere, sys.stdout.fileno())


def replace_unknown_characters() -> None:
    """Make standard output write "?" for characters that the terminal's encoding lacks.

    It would fail otherwise.
    """
    out = sys.stdout
    if not isinstance(out, io.TextIOWrapper):
        return
    # Keep names of files that are no UTF-8 as they are where the terminal takes their bytes
    if out.errors == "strict" or codecs.lookup(out.encoding).name != "utf-8":
        out.reconfigure(errors="replace")


def explain(error: Exception) -> str:
    """Return what an error says; where JAX or the file system speaks, one line of what to do."""
    said = str(error)
    if "RESOURCE_EXHAUSTED" in said:
        return (
            f"out of memory ({_first_line(said)}): `jaxblt plan RECIPE` shows what needs it; raise "
            "train.accumulate, set remat of the model's stacks to 'full', or lower data.batch_size or data.seq_len"
        )
    if isinstance(error, OSError) and (error.errno, error.filename) == (errno.ENOSPC, None):
        return f"{said}: free some, or write elsewhere (XDG_CACHE_HOME moves the user's cache)"
    names = _names(error)
    if isinstance(error, FileNotFoundError) and names:
        name = next((name for name in names if not os.path.exists(name)), names[0])
        return _explain_missing_program(name) if _is_of_a_program(error) else _explain_missing(name)
    if isinstance(error, OSError) and error.errno in FIXES and names:
        return f"{' -> '.join(map(repr, names))}: {error.strerror}: {FIXES[error.errno]}"
    if _is_without_device(error):
        return (
            f"JAX finds no device for JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r} here: unset it to take "
            "what there is, or set it to cpu; `jaxblt doctor` shows what JAX finds"
        )
    return said


def _names(error: Exception) -> list[str]:
    """Return the files that an error of the file system names: none, one, or those of a move. Numbers are no names."""
    given = (error.filename, error.filename2) if isinstance(error, OSError) else ()
    return [os.fsdecode(name) for name in given if isinstance(name, str | bytes)]


def _explain_missing(name: str) -> str:
    if os.path.islink(name):
        link = f"{name!r} is a link to {os.readlink(name)!r}"
        return f"{link}, which leads to no file: mend the link, or name another file"
    folder, where = os.path.dirname(name), f"(looked from {os.getcwd()!r})"
    if folder and not os.path.isdir(folder):
        return f"there is no folder {folder!r} for {name!r} {where}: make it, or name another file"
    return f"there is no file {name!r} {where}: name one that exists"


def _explain_missing_program(name: str) -> str:
    return f"there is no program {name!r} on the path: install it, or add its folder to PATH"


def _is_of_a_program(error: FileNotFoundError) -> bool:
    """Return whether a program was to be started; its folder may be missing too, and is no program."""
    innermost = traceback.extract_tb(error.__traceback__)[-1:]
    started = [frame.name for frame in innermost] in (["_execute_child"], ["_posix_spawn"])
    return started and not os.path.dirname(os.fsdecode(error.filename))


def _is_without_device(error: Exception) -> bool:
    """Return whether JAX found no device.

    It says so, or fails an assertion where its plugin finds no GPU.
    """
    innermost = traceback.extract_tb(error.__traceback__)[-1:]
    asserted = isinstance(error, AssertionError) and [frame.name for frame in innermost] == ["backends"]
    return asserted or str(error).startswith("Unable to initialize backend")


def _first_line(said: str) -> str:
    return said.strip().partition("\n")[0][:200]


def parse[T](function: Callable[..., T], argv: Sequence[str], *, prog: str) -> T:
    """Call `function` with the options in `argv`; its docstring is the help."""

    @functools.wraps(function)
    def bound(*args: Any, **options: Any) -> Callable[[], T]:
        return functools.partial(function, *args, **options)

    # Call outside of the parser: an error of the script itself is none of the command line.
    return parse_options(bound, argv, prog=prog)()


def parse_options(function: Callable[..., Any], argv: Sequence[str], *, prog: str, **options: Any) -> Any:
    """Return what `function` returns for the options in `argv`.

    Keywords go to `tyro.cli`. Exits with status 2 and one line that names option, value and what is expected, in
    place of tyro's box.
    """
    if {"-h", "--help"} & set(argv):
        return tyro.cli(function, args=list(argv), prog=prog, **options)
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box), _wide_terminal():
            return tyro.cli(function, args=list(argv), prog=prog, **options)
    except SystemExit as stopped:
        if stopped.code == 2:
            print(f"error: {one_line(box.getvalue())} ({prog} --help explains)", file=sys.stderr)
        raise


@contextlib.contextmanager
def _wide_terminal() -> Iterator[None]:
    """Keep tyro from breaking lines, and with them values."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


WORDING = (
    (r"^Error parsing (?:recipe|own)\.(\S+): ", r"--\1: "),
    (r"^Error parsing (?:recipe|own): ", ""),
    (r"^Error parsing (\S+): ", r"\1: "),
    (r"invalid literal for int\(\) with base 10: (.*)$", r"expected a whole number, got \1"),
    (r"could not convert string to float: (.*)$", r"expected a number, got \1"),
    (r"no type matching (.*) could be instantiated from \[(.*)\]\.$", r"expected \1, got \2"),
    (r"\{None\}\|", "None or "),
    (
        r"^invalid choice (.*) for argument '(\S+)'\. Expected one of \((.*)\)\.$",
        r"\2: expected one of \3, got \1",
    ),
    (r"^Missing value for argument '(\S+)'\. Expected (\d+) values\.$", r"\1: expected a value, got none"),
)
"""Patterns that put messages of tyro in the words of this project; other messages are left as they are."""
FRAME = " │╭╮╰╯─"


def one_line(box: str) -> str:
    """Return the message in tyro's box of an error, and what it proposes instead.

    Frame and help texts are left out.
    """
    lines = [line.strip(FRAME) for line in box.splitlines()[1:]]  # the first is the title
    message = [line for line in lines if line.strip("-")]
    if not message:
        return box.strip()
    said = message[0]
    for pattern, words in WORDING:
        said = re.sub(pattern, words, said)
    if said.endswith(":"):  # "Missing from jaxblt patch:", and below what is missing
        said = " ".join([said, *message[1:3]])
    if "Perhaps you meant:" in message:
        said += f"; perhaps {' or '.join(line for line in message[1:] if line.startswith('--'))}"
    return said
