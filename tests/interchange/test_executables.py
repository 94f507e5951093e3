"""Executables answer as the program does, in a process that compiles nothing and knows no run."""

import json
import re
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from jaxblt.cli.main import main
from jaxblt.interchange import make_score_program, read_executables, write_executables
from jaxblt.models import ByteLMConfig
from jaxblt.profiling.provenance import cpu_model
from tests.answers.runs import SEQ_LEN, SHORT, make_run
from tests.inference.server.conftest import ONE

CLEAN = """
import sys
import jax
import numpy as np

compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
from jaxblt.interchange import read_executables

found = read_executables(sys.argv[1])
records = [bytes.fromhex(record) for record in sys.argv[3:]]
np.savez(sys.argv[2], **{f"{n}.{name}": x for n in (1, 3) for name, x in found(records[:n]).items()})
assert "jaxblt.run" not in sys.modules
assert not [name for name in compiled if "backend_compile" in name], compiled
"""


@pytest.fixture(scope="module")
def run():
    return make_run(ByteLMConfig(stack=ONE))


@pytest.fixture(scope="module")
def file(run, tmp_path_factory):
    file = tmp_path_factory.mktemp("executables") / "score.xla"
    write_executables(make_score_program(run, SEQ_LEN, platforms=("cpu",)), file, (4, 1))
    return file


@pytest.mark.slow(days=28, group="costly", turn="interchange/test_executables")
def test_a_clean_process_answers_the_same(run, file, tmp_path):
    out, records = tmp_path / "found.npz", [record.hex() for record in SHORT[:3]]
    subprocess.run([sys.executable, "-c", CLEAN, str(file), str(out), *records], check=True)
    scores = run.score(SHORT[:3], per_byte=True)
    here = read_executables(file)
    with np.load(out) as found:
        for n in (1, 3):
            for name, rows in here(SHORT[:n]).items():
                np.testing.assert_array_equal(found[f"{n}.{name}"], rows)
            np.testing.assert_allclose(found[f"{n}.nats"].sum(1), scores.log_likelihood[:n], rtol=1e-5)


def test_a_batch_has_its_limit_and_a_file_its_place(file, tmp_path):
    found = read_executables(file)
    assert (found.most_records, found.about["compiler"], found.about["rows"]) == (4, "XLA", [1, 4])
    with pytest.raises(ValueError, match="5 records were given, expected at most 4, the largest batch"):
        found(SHORT[:5])
    with pytest.raises(ValueError, match="no records were given"):
        found([])
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(tmp_path / "other.xla", "w") as other:
        for name in archive.namelist():
            about = json.loads(archive.read(name)) if name == "about.json" else None
            if about is not None:
                about["device"]["kind"] = "NVIDIA H200"
            other.writestr(name, archive.read(name) if about is None else json.dumps(about))
    elsewhere = f"'kind': 'NVIDIA H200'}}, here it is {found.about['device']}: compile it again"
    assert found.about["device"] == {"platform": "cpu", "kind": cpu_model()}
    for path, said in ((tmp_path / "other.xla", elsewhere), (__file__, "holds no executables for here")):
        with pytest.raises(ValueError, match=re.escape(said)):
            read_executables(path)
    with pytest.raises(FileNotFoundError, match="jaxblt export --executables"):
        read_executables(tmp_path / "none")


def test_executables_belong_to_programs(tmp_path):
    with pytest.raises(ValueError, match="--executables belongs to --stablehlo"):
        main(["export", "runs/tiny", "--out", str(tmp_path / "a"), "--executables", "1"])
