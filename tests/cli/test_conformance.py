"""`jaxblt conformance` prints a table and a script for each failure, and says what it cannot do in one line."""

import pytest

from jaxblt.cli.main import main

SOUND = """
from jaxblt.testing.conformance import Layer, Subject

def make():
    import numpy as np

    def call(x, documents=None, state=None):
        return np.cumsum(x, 1, dtype="float32"), None

    return Layer(call)

subject = Subject(name="sums", make=make, width=1, promises=["causal"], lengths=(1, 3))
"""


@pytest.fixture
def file(tmp_path):
    return tmp_path / "layer_of_mine.py"


def test_a_sound_layer_passes(file, capsys):
    file.write_text(SOUND)
    assert main(["conformance", str(file)]) == 0
    said = capsys.readouterr().out
    assert "future " in said
    assert said.endswith("every promised property holds\n")


def test_a_failure_is_a_script_and_status_1(file, capsys):
    file.write_text(
        SOUND.replace("np.cumsum(x, 1", "np.cumsum(x[:, ::-1], 1") + "subjects = (subject, subject)\n"
    )
    assert main(["conformance", str(file), "--only", "future"]) == 1
    said = capsys.readouterr().out
    assert said.count("FAILS at length 2, cut 1") == 2
    assert "\n# future\nimport numpy as np\n" in said
    assert "actual, expected = call(changed)[0][:, :cut], call(x)[0][:, :cut]" in said
    assert said.endswith("2 properties do not hold\n")


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (
            ("import numpy as np", "import nowhere as np"),
            ImportError,
            "subject 'sums' needs nowhere, which is not ",
        ),
        (('["causal"]', "[]"), ValueError, "subject 'sums' promises nothing, expected some of: causal, "),
        (
            ("width=1", "width=1, gpu=True"),
            RuntimeError,
            "subject 'sums' needs a GPU, and JAX finds none: run it ",
        ),
        (("subject =", "other ="), ValueError, "defines no subject: write subject = Subject"),
    ],
)
def test_what_cannot_be_checked_is_one_line(file, change, error, said):
    file.write_text(SOUND.replace(*change))
    with pytest.raises(error, match=said) as raised:
        main(["conformance", str(file)])
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_told(file):
    with pytest.raises(
        FileNotFoundError, match="to take a subject from: name a Python file that defines one"
    ):
        main(["conformance", str(file)])
