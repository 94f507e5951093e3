"""A checkpoint of Evo 2 becomes a run that answers as any run; what is wrong with one is told in one line."""

import json
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxblt
from jaxblt.cli.main import main
from jaxblt.inference import SamplingConfig
from jaxblt.interchange.evo2_run import read_evo2, write_evo2
from jaxblt.interchange.striped_hyena import entries
from jaxblt.interchange.torch_file import Lazy, open_torch, write_torch
from jaxblt.models import ByteLMConfig
from jaxblt.models.striped_hyena import EVO2, evo2, striped_hyena
from jaxblt.testing.tolerances import bound, worst
from tests.docs.documents import ROOT, blocks
from tests.interchange import evo2_weights as weights
from tests.interchange.test_striped_hyena import FIXTURE, draw, tiny

TENSORS = draw("mixed")[1]
LENGTH = 129
WIDE = tiny("SSSS")._replace(dim=256, mlp_dim=2048)


@pytest.fixture(scope="module", autouse=True)
def tiny_is_released():
    """Tiny models stand among the released ones."""
    with pytest.MonkeyPatch.context() as patch:
        table = {
            **EVO2,
            "tiny": tiny(weights.CASES["mixed"]),
            "one": tiny("S"),
            "two": tiny("SA"),
            "wide": WIDE,
        }
        patch.setattr("jaxblt.models.striped_hyena.EVO2", table)
        patch.setattr("jaxblt.interchange.evo2_run.EVO2", table)
        yield


def save(file: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A checkpoint as torch writes it."""
    write_torch(file, {name: Lazy(x.shape, x.dtype, lambda x=x: x) for name, x in tensors.items()})
    return file


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """The folder of a run of a checkpoint in two parts, with a head beside the embedding."""
    folder = tmp_path_factory.mktemp("evo2")
    data = save(
        folder / "evo2.pt", TENSORS | {"unembed.weight": TENSORS["embedding_layer.weight"]}
    ).read_bytes()
    for i, part in enumerate((data[:50_000], data[50_000:])):
        (folder / f"in_parts.pt.part{i}").write_bytes(part)
    main(["import", str(folder / "in_parts.pt"), "--config", "tiny", "--out", str(folder / "run")])
    assert not [path for path in folder.iterdir() if path.is_dir() and path.name != "run"]
    return folder / "run"


@pytest.fixture(scope="module")
def run(run_dir):
    return jaxblt.load(run_dir, dtype="float32")


@pytest.mark.slow(days=28, group="costly", turn="interchange/test_evo2_run")
def test_projections_of_an_import_may_be_in_fp8(tmp_path):
    """They answer otherwise than in bfloat16, and no further off than their rounding."""
    file = save(tmp_path / "tiny.pt", TENSORS)
    main(["import", str(file), "--config", "tiny", "--out", str(tmp_path / "plain")])
    main(["import", str(file), "--config", "tiny", "--fp8", "--out", str(tmp_path / "fp8")])
    plain, fp8 = (jaxblt.load(tmp_path / name) for name in ("plain", "fp8"))
    assert fp8.recipe.model == evo2("tiny", fp8=True) != plain.recipe.model
    scores = [r.score([record(40)], per_byte=True, batch_size=1).per_byte for r in (plain, fp8)]
    own, other = (nats[0] for nats in scores if nats is not None)
    assert 1e-4 < worst(other, own) < 0.25


def record(length: int) -> bytes:
    return weights.draw_bytes(length)[1:].astype(np.uint8).tobytes()


@pytest.mark.slow(days=28, group="costly", turn="interchange/test_evo2_run")
def test_likelihoods_and_greedy_bytes_are_the_references(run):
    with np.load(FIXTURE / "mixed.npz") as expected:
        found = run.score([record(LENGTH)]).log_likelihood[0]
        assert worst(found, expected[f"likely_{LENGTH}"]) < bound(np.float32, LENGTH)
        prompts = [record(n + 1) for n in weights.PROMPTS]
        known = [expected[f"greedy_{n}"].tobytes() for n in weights.PROMPTS]
    options = {"sampling": SamplingConfig(temperature=0.0), "alphabet": bytes(range(2, 256))}
    assert run.generate(prompts, max_new_bytes=weights.STEPS, **options) == known


def save_shards(folder: Path, shards: list[dict[str, np.ndarray]]) -> Path:
    """A folder as Hugging Face writes large models: files and an index."""
    folder.mkdir()
    index = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name)
        index |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.slow(days=28, group="costly", turn="interchange/test_evo2_run")
def test_safetensors_shards_and_torch_give_one_run(run, tmp_path):
    save_file(TENSORS, tmp_path / "tiny.safetensors")
    names = sorted(TENSORS)
    save_shards(tmp_path / "shards", [{name: TENSORS[name] for name in names[i::3]} for i in range(3)])
    for source in ("tiny.safetensors", "shards"):
        out = tmp_path / f"{source}.run"
        main(["import", str(tmp_path / source), "--config", "tiny", "--out", str(out)])
        again = jaxblt.load(out)
        assert again.recipe.model == run.recipe.model
        jax.tree.map(np.testing.assert_array_equal, again.params, run.params)
    (tmp_path / "shards" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00003\.safetensors does not exist"):
        main(["import", str(tmp_path / "shards"), "--config", "tiny", "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_an_import_holds_at_most_twice_its_largest_tensor(tmp_path):
    """Arrays of numpy and bytes are counted; those of the writer are bounded by what it is given at a time."""
    shapes = {name: entry.shape for name, entry in entries(striped_hyena(WIDE)).items()}
    largest = max(4 * int(np.prod(shape)) for shape in shapes.values())
    assert sum(4 * int(np.prod(shape)) for shape in shapes.values()) > 8 * largest
    save_file(weights.draw(shapes, 3), tmp_path / "wide.safetensors")
    tracemalloc.start()
    try:
        read_evo2(tmp_path / "wide.safetensors", tmp_path / "run", config="wide")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * largest + 2**20


@pytest.mark.slow(days=28, group="costly")
def test_an_imported_run_embeds_compares_variants_and_is_finetuned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shapes = {name: entry.shape for name, entry in entries(striped_hyena(tiny("S"))).items()}
    save(Path("one.pt"), weights.draw(shapes, 7))
    Path("x.fa").write_text(">a\nACGTTGCAACGTACGTTAGACATTAGGGA\n")
    Path("x.vcf").write_text("#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\na\t5\t.\tT\tG\t.\t.\t.\n")
    rows = [f"{'ACGT'[i % 4] * 20},{i % 2}" for i in range(40)]
    Path("labels.csv").write_text("\n".join(["sequence,label", *rows]) + "\n")
    main(["import", "one.pt", "--config", "one", "--out", "run"])
    main(["embed", "run", "x.fa", "--out", "states.npz"])
    with np.load("states.npz") as states:
        assert any(x.shape == (1, weights.WIDTH) for x in states.values())
    main(["variants", "run", "x.vcf", "x.fa", "--context", "32", "--out", "effects.tsv"])
    assert len(Path("effects.tsv").read_text().splitlines()) == 2
    options = [
        "--data.paths",
        "labels.csv",
        "--run-dir",
        "tuned",
        "--train.steps",
        "1",
        "--train.eval-every",
        "1",
    ]
    main(["finetune", "run", *options])
    assert jaxblt.load("tuned").recipe.model.base == evo2("one")


@pytest.mark.slow(days=28, group="long")
def test_the_tutorial_runs_on_a_tiny_model(tmp_path, monkeypatch):
    """Its sizes are replaced, and the GPUs that it plans for are this machine's devices."""
    monkeypatch.chdir(tmp_path)
    shapes = {name: entry.shape for name, entry in entries(striped_hyena(tiny("SA"))).items()}
    save(Path("two.pt"), weights.draw(shapes, 7))
    main(["import", "two.pt", "--config", "two", "--out", "runs/evo2_7b"])
    bases = "".join("ACGT"[i] for i in np.random.default_rng(0).integers(0, 4, 1000))
    for name in ("mine.fa", "arm.fa"):
        Path(name).write_text(f">one\n{bases}\n")
    sizes = {"seq_len=8192, batch_size=4": "seq_len=64, batch_size=8", "2**20": "64", "layer=26": "layer=1"}
    sizes |= {'devices_of("h200", 8)': "None", "steps=500": "steps=101"}
    text = "\n".join(blocks(ROOT / "docs" / "tutorials" / "evo2.md", "python"))
    for shown, small in sizes.items():
        assert shown in text, shown
        text = text.replace(shown, small)
    names = {}
    exec(compile(text, "evo2.md", "exec"), names)
    assert (Path("runs/mine") / "checkpoints").is_dir()
    assert names["memory"].total > 0
    main(["score", "runs/mine", "arm.fa", "--out", "scores.tsv"])
    assert len(Path("scores.tsv").read_text().splitlines()) == 2
    assert names["states"].arrays[0].shape == (weights.WIDTH,)


@pytest.mark.slow(days=28, group="costly", turn="interchange/test_evo2_run")
def test_what_was_imported_is_exported_for_vortex(run, run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["export", str(run_dir), "--to", "vortex", "--out", "again.pt"])
    with open_torch("again.pt") as found:
        assert found.tensors.keys() == TENSORS.keys()
        for name, x in TENSORS.items():
            assert worst(found.read(name), x) < bound(np.float32)
    other = replace(run, recipe=replace(run.recipe, model=ByteLMConfig()))
    with pytest.raises(ValueError, match="the run's model is none of Evo 2"):
        write_evo2(other, "other.pt")


def test_torchs_own_file_is_read():
    numbers = np.arange(6, dtype=np.float32)
    with open_torch(FIXTURE / "torch.pt") as found:
        read = {name: found.read(name) for name in found.tensors}
        assert found.others == ["inner._extra_state"]
    np.testing.assert_array_equal(read["weight"], numbers.reshape(2, 3)[:, 1:])
    np.testing.assert_array_equal(read["bias"], numbers[:2])
    np.testing.assert_array_equal(read["turned"], numbers.reshape(2, 3).T)
    np.testing.assert_array_equal(read["half"].astype(np.float32), numbers)
    assert read["half"].dtype.name == "bfloat16"


def pickled(data: bytes) -> Callable[[Path], None]:
    """What writes an archive of torch with another pickle."""

    def write(file: Path) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", data)

    return write


def with_tensors(**changed: np.ndarray | None) -> Callable[[Path], None]:
    """What writes the checkpoint with other tensors; `_` stands for a dot, and None leaves one out."""
    names = {name.replace(".", "_"): name for name in TENSORS}
    given = TENSORS | {names.get(name, name): x for name, x in changed.items()}

    def write(file: Path) -> None:
        save(file, {name: x for name, x in given.items() if x is not None})

    return write


def packed(file: Path) -> None:
    """The checkpoint, compressed."""
    with zipfile.ZipFile(save(file, TENSORS)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


POLES = TENSORS["blocks.2.filter.log_poles"]
BAD = {
    "cut off": (lambda f: f.write_bytes(save(f, TENSORS).read_bytes()[:90_000]), "no whole zip archive"),
    "no archive": (lambda f: f.write_bytes(b"\x80\x02}q\x00."), "no whole zip archive"),
    "no torch": (lambda f: zipfile.ZipFile(f, "w").close(), "0 entries data.pkl"),
    "packed": (packed, "not compressed"),
    "code": (pickled(b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00ls\x85R."), "asks for posix.system"),
    "fp8": (
        pickled(b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v3\n."),
        "FP8 .*without their scales",
    ),
    "opcode": (pickled(b"\x80\x02(iposix\nsystem\n."), "opcode INST"),
    "damaged": (pickled(b"\x80\x02)R."), "pickle is damaged"),
    "no end": (pickled(b"\x80\x02}"), "pickle"),
    "list": (pickled(b"\x80\x02]."), "holds list, expected tensors by name"),
    "nested": (pickled(b"\x80\x02}X\x05\x00\x00\x00model}s."), "entry 'model' is dict"),
    "missing": (with_tensors(norm_scale=None), "missing norm.scale"),
    "surplus": (with_tensors(lora=np.ones(2, np.float32)), "unexpected lora"),
    "shape": (
        with_tensors(norm_scale=np.ones(8, np.float32)),
        r"wrong shape: norm.scale is \(8,\), expected \(16,\)",
    ),
    "nan": (with_tensors(norm_scale=np.full(16, np.nan, np.float32)), "norm.scale holds NaN or infinity"),
    "grows": (with_tensors(blocks_2_filter_log_poles=POLES + 9), "log_poles is .*, expected numbers below 0"),
    "head": (
        with_tensors(**{"unembed.weight": np.ones((512, 16), np.float32)}),
        "unembed.weight is not embedding",
    ),
    "base": (
        with_tensors(blocks_3_inner_mha_cls_rotary_emb_inv_freq=np.ones(4, np.float32)),
        "inv_freq is of another base than 10000",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_one_line_and_nothing_is_written(name, tmp_path):
    write, message = BAD[name]
    file = tmp_path / "bad.pt"
    write(file)
    with pytest.raises(ValueError, match=message) as caught:
        main(["import", str(file), "--config", "tiny", "--out", str(tmp_path / "run")])
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.pt"]


def test_fp8_weights_without_scales_are_refused(tmp_path):
    scaled = TENSORS | {"norm.scale": np.ones(16, jnp.float8_e4m3fn)}
    file = tmp_path / "fp8.safetensors"
    save_file(scaled, file)
    with pytest.raises(ValueError, match=r"norm\.scale \(F8_E4M3\): FP8 .* without their scales") as caught:
        main(["import", str(file), "--config", "tiny", "--out", str(tmp_path / "run")])
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_storage_of_another_dtype_is_named(tmp_path):
    save(tmp_path / "x.pt", {"a": np.ones(4, np.float32)})
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        pickle = archive.read("archive/data.pkl").replace(b"FloatStorage", b"CharStorage")
    pickled(pickle)(tmp_path / "int8.pt")
    with (
        open_torch(tmp_path / "int8.pt") as found,
        pytest.raises(ValueError, match=r"a is torch\.CharStorage"),
    ):
        found.read("a")


def test_the_config_is_that_of_the_files_name(tmp_path):
    save(tmp_path / "evo2_7b.pt", TENSORS)
    with pytest.raises(ValueError, match=r"missing blocks\.5\.[^;]*; wrong shape: embedding_layer\.weight"):
        main(["import", str(tmp_path / "evo2_7b.pt"), "--out", str(tmp_path / "run")])
    with pytest.raises(ValueError, match=r"mine\.pt is not the name of a published file"):
        main(["import", str(tmp_path / "mine.pt"), "--out", str(tmp_path / "run")])
    with pytest.raises(FileNotFoundError, match=r"neither does evo2_40b\.pt\.part0"):
        main(["import", str(tmp_path / "evo2_40b.pt"), "--out", str(tmp_path / "run")])
