"""Ctrl-C ends a command without a word, also while it imports."""

import os
import subprocess
import sys

import pytest

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


def test_the_table_of_commands_needs_no_jax():
    text = "import sys; from jaxblt.cli import main, parsing; main.usage(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
