"""Terminals that lack a character get another one in its place; Ctrl-C is quiet."""

import contextlib
import errno
import io
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxblt.cli import interrupts
from jaxblt.cli.interrupts import WAITING
from jaxblt.cli.main import main as jaxblt_main
from jaxblt.cli.parsing import FIXES, explain, run
from jaxblt.cli.variables import VARIABLES


@pytest.mark.parametrize(
    ("encoding", "errors", "shown"),
    [
        ("latin-1", "strict", b"a?\xe9 ???"),
        ("ascii", "surrogateescape", b"a?? ???"),
        ("utf-8", "surrogateescape", "a│é 日本".encode() + b"\xff"),
    ],
)
def test_other_characters_stand_for_those_it_lacks(encoding, errors, shown, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["jaxblt"])
    with pytest.raises(SystemExit) as stopped:
        run(lambda argv: print("a│é 日本\udcff", end=""))
    terminal.flush()
    assert stopped.value.code == 0
    assert terminal.buffer.getvalue() == shown


def test_output_that_nobody_reads_is_no_error(monkeypatch, capsys):
    """Neither closed from the start, nor left by its reader."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "argv", ["jaxblt"])
    for output, status in ((None, 0), (os.fdopen(writer, "w"), 1)):
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as stopped:
            run(lambda argv: print("a"))
        assert stopped.value.code == status
        # Python closes it at its end, and writes what is left
        sys.stdout.close()
    assert capsys.readouterr().err == ""


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["jaxblt"])
    with pytest.raises(SystemExit) as stopped:
        run(interrupt)
    assert stopped.value.code == 130
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_explained():
    """Unless the error names the file, and says more by itself."""
    said = explain(OSError(errno.ENOSPC, "No space left on device"))
    assert said.endswith("device: free some, or write elsewhere (XDG_CACHE_HOME moves the user's cache)")
    assert explain(OSError(errno.ENOSPC, "free some", "run")).endswith("free some: 'run'")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no.fa", "there is no file 'no.fa' (looked from {here!r}): name one that exists"),
        (
            "no/x.json",
            "there is no folder 'no' for 'no/x.json' (looked from {here!r}): make it, or name another file",
        ),
    ],
)
def test_a_missing_file_is_named_with_the_fix(name, said, tmp_path, monkeypatch, capsys):
    """The system's own error says "[Errno 2]"; benchmarks and commands open files of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["jaxblt"])
    with pytest.raises(SystemExit) as stopped:
        run(lambda argv: Path(name).read_text("utf-8"))
    assert stopped.value.code == 1
    assert capsys.readouterr().err == f"error: {said.format(here=str(tmp_path))}\n"


def test_a_link_that_leads_nowhere_is_no_missing_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.json").symlink_to("gone.json")
    with pytest.raises(FileNotFoundError) as missing:
        Path("x.json").read_text("utf-8")
    said = "'x.json' is a link to 'gone.json', which leads to no file: mend the link, or name another file"
    assert explain(missing.value) == said


def test_errors_of_the_file_system_say_what_to_do(tmp_path):
    """Python's own text has a number, and no fix."""
    file, folder, circle = tmp_path / "file", tmp_path / "folder", tmp_path / "circle"
    file.write_text("")
    folder.mkdir()
    circle.symlink_to(circle)
    for path, read in (
        (file, Path.mkdir),
        (file / "x", Path.read_bytes),
        (folder, Path.read_bytes),
        (circle, Path.read_bytes),
        (tmp_path / ("x" * 300), Path.read_bytes),
    ):
        with pytest.raises(OSError, match="Errno") as met:
            read(path)
        number = met.value.errno
        assert explain(met.value) == f"{str(path)!r}: {os.strerror(number)}: {FIXES[number]}"


def test_a_move_names_both_files_and_a_number_is_no_name(tmp_path):
    """Python names the file that is moved first, and it may be fine."""
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("")
    folder.mkdir()
    with pytest.raises(IsADirectoryError) as met:
        file.replace(folder)
    assert explain(met.value) == f"{str(file)!r} -> {str(folder)!r}: Is a directory: {FIXES[errno.EISDIR]}"
    with pytest.raises(FileNotFoundError) as missing:
        file.replace(tmp_path / "none" / "file")
    assert explain(missing.value).startswith(f"there is no folder {str(tmp_path / 'none')!r} for ")
    number = os.open(folder, os.O_RDONLY)
    with pytest.raises(IsADirectoryError) as met, open(number, closefd=False):
        pass
    os.close(number)
    assert explain(met.value) == str(met.value)


def test_a_missing_program_is_no_missing_file(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxblt"])
    with pytest.raises(SystemExit):
        run(lambda argv: subprocess.run(["no-such-program", "file"], check=True))
    said = "error: there is no program 'no-such-program' on the path: install it, or add its folder to PATH\n"
    assert capsys.readouterr().err == said


def test_the_module_of_the_program_is_the_program():
    """It would end in silence, as if it had done its work."""
    done = subprocess.run([sys.executable, "-m", "jaxblt.cli.main", "trian"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: unknown command 'trian' (perhaps train)")


@pytest.mark.slow(days=28, group="costly", turn="cli/test_terminal")
def test_help_and_patches_are_shown(tmp_path, monkeypatch):
    (tmp_path / "日本.txt").write_text("Hello brave new world. ")
    for words in (["evaluate", "--help"], ["patch", str(tmp_path / "日本.txt"), "--mode", "space"]):
        terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "argv", ["jaxblt", *words])
        with pytest.raises(SystemExit) as stopped:
            run(jaxblt_main)
        terminal.flush()
        assert stopped.value.code == 0
        assert len(terminal.buffer.getvalue()) > 100


# Jobs in a shell's background ignore Ctrl-C, and what they start does too
HEAR = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
START = HEAR + "from jaxblt.cli.interrupts import end_quietly; end_quietly(); print('begun'); "
SLOW = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('too far')\n"


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (START + "import slow", 130, b""),
        (START + "exec(open('slow.py').read())", -2, b"KeyboardInterrupt"),
    ],
    ids=["while a module is imported", "elsewhere"],
)
def test_ctrl_c_is_quiet_while_a_module_is_imported(text, status, said, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (status, b"begun\n")
    assert done.stderr.strip().endswith(said)
    assert bool(done.stderr) == bool(said)


DROPPED = (
    "import time, weakref\n"
    "from jaxblt.cli.parsing import run\n"
    "class Thing: pass\n"
    "def main(argv):\n"
    "    thing = Thing()\n"
    "    weakref.finalize(thing, os.kill, os.getpid(), signal.SIGINT)\n"
    "    del thing\n"
    "    time.sleep(20)\n"
    "    print('too far')\n"
    "run(main)\n"
)


def test_ctrl_c_ends_a_command_within_a_finalizer():
    """Python prints what finalizers raise, and goes on."""
    text = START + "import os\n" + DROPPED
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"begun\n", b"")


def test_other_dropped_errors_go_where_they_went():
    text = HEAR + "import sys; sys.unraisablehook = lambda dropped: print(dropped.exc_value); "
    text += START + "\nclass Thing:\n    def __del__(self): raise OSError('mine')\nThing()"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"begun\nmine\n", b"")


COMPILES = (
    "import sys, threading, time\n"
    "from concurrent.futures import ThreadPoolExecutor\n"
    "import jax, jax.numpy as jnp\n"
    "from jaxblt.cli.interrupts import _is_compiling\n"
    "from jaxblt.cli.parsing import run\n"
    "def tell():\n"
    "    while not _is_compiling():\n"
    "        time.sleep(0.01)\n"
    "    print('ready', flush=True)\n"
    "def sort(x):\n"
    "    for _ in range(1500):\n"
    "        x = jnp.sort(1.01 * x)\n"
    "    return x\n"
    "lowered = jax.jit(sort).lower(jnp.ones(65))\n"
    "def main(argv):\n"
    "    threading.Thread(target=tell).start()\n"
    "    with ThreadPoolExecutor(1) as pool:\n"
    "        pool.submit(lowered.compile).result() if argv else lowered.compile()\n"
    "    print('compiled', flush=True)\n"
)


@pytest.mark.slow(days=28, group="processes of their own")
@pytest.mark.parametrize("where", ["the main thread", "another thread"])
def test_ctrl_c_while_xla_compiles_is_answered_and_the_next_one_ends_the_command(where):
    given = ["thread"] if where == "another thread" else []
    command = [sys.executable, "-c", f"{START}\n{COMPILES}run(main)", *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while process.stdout.readline() != "ready\n":
            pass
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == f"{WAITING}\n"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stdout.read() == ""
        assert process.stderr.read() == ""


@pytest.mark.parametrize("is_closed", [False, True])
def test_an_interrupt_of_a_later_compilation_is_told_again_and_never_on_standard_output(
    is_closed, monkeypatch, capsys
):
    heard, written = os.pipe()
    pressed = bytes([signal.SIGINT])

    def answers():
        yield True
        os.write(written, pressed)
        yield False  # the first program is compiled
        yield True
        os.close(written)
        yield False

    compiling = answers()
    monkeypatch.setattr(interrupts, "_is_compiling", lambda: next(compiling))
    monkeypatch.setattr(interrupts, "ANSWER_S", 0)
    if is_closed:
        monkeypatch.setattr(sys, "stderr", None)
    os.write(written, pressed)
    interrupts._tell_of_compiling(heard)
    os.close(heard)
    assert next(compiling, None) is None
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "" if is_closed else f"{WAITING}\n" * 2)


@pytest.mark.parametrize(
    ("pressed_at", "compiles", "ends"), [(0.6, True, False), (1.6, True, True), (1.6, False, False)]
)
def test_only_an_interrupt_behind_the_answer_ends_a_compilation(pressed_at, compiles, ends, monkeypatch):
    """A launcher sends a second one at once, and one that meets the end of the compilation is for the run."""
    heard, written = os.pipe()
    presses, now = [pressed_at], [0.0]

    def answers():
        yield from (True, True, compiles)
        os.close(written)
        yield False

    def wait(seconds):
        now[0] += seconds
        while presses and presses[0] <= now[0]:
            os.write(written, bytes([signal.SIGINT]))
            presses.pop()

    def look(*args):
        wait(1.0 if args[-1] else 0)
        return select.select(*args[:-1], 0)

    def end(status):
        raise SystemExit(status)

    monkeypatch.setattr(interrupts, "time", SimpleNamespace(sleep=wait))
    monkeypatch.setattr(interrupts, "select", SimpleNamespace(select=look, PIPE_BUF=select.PIPE_BUF))
    compiling = answers()
    monkeypatch.setattr(interrupts, "_is_compiling", lambda: next(compiling))
    monkeypatch.setattr(os, "_exit", end)
    os.write(written, bytes([signal.SIGINT]))
    with pytest.raises(SystemExit) if ends else contextlib.nullcontext():
        interrupts._tell_of_compiling(heard)
    os.close(heard)
    if ends:
        os.close(written)


def test_a_misspelt_environment_variable_is_told(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxblt"])
    monkeypatch.setenv("JAXBLT_APIKEY", "secret")
    monkeypatch.setenv("JAXBLT_EXPANSION", "9")
    with pytest.raises(SystemExit):
        run(lambda argv: None)
    said = capsys.readouterr().err
    assert said.startswith(
        "warning: jaxblt reads no environment variable JAXBLT_APIKEY (perhaps JAXBLT_API_KEY): known are "
    )
    assert said.count("\n") == 1
    assert "secret" not in said


def test_the_variables_are_those_that_files_name():
    read = set()
    for room in ("jaxblt", "pallas_kernels", "experiments", "tests"):
        for file in Path(room).rglob("*.py"):
            if file.name != "variables.py":
                read |= set(re.findall(r"\bJAXBLT_[A-Z][A-Z_0-9]*", file.read_text("utf-8")))
    assert read - {"JAXBLT_APIKEY"} == set(VARIABLES)


def test_the_table_of_commands_needs_no_jax():
    text = "import sys; from jaxblt.cli import main, parsing; main.usage(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
