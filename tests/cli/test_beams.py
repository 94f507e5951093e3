"""`jaxblt generate --beams` writes what the function finds."""

import pytest

from jaxblt.cli.main import main
from jaxblt.inference import beam_search
from jaxblt.models import ByteLMConfig, StackConfig
from tests.answers.runs import HEADS, make_run
from tests.mixer_table import table

MIXERS = table(attention=HEADS)


@pytest.mark.slow(days=28, group="costly", turn="cli/test_beams")
def test_the_best_beam_of_each_prompt_is_written(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    run = make_run(
        ByteLMConfig(stack=StackConfig(dim=16, num_layers=1, pattern="A", mlp_dim=24, mixers=MIXERS))
    )
    monkeypatch.setattr("jaxblt.cli.generate.load_quantized", lambda *_, **__: run)
    command = ["generate", "r", "--prompts", "ab", "c", "--beams", "3", "--length-exponent", "0.5"]
    main([*command, "--max-new-bytes", "5", "--alphabet", "ab"])
    options = {"max_new_bytes": 5, "beams": 3, "length_exponent": 0.5, "alphabet": b"ab"}
    best = [beam_search(run.decoder, run.decoder_params, prompt, **options)[0] for prompt in (b"ab", b"c")]
    assert capsysbinary.readouterr().out == b"ab%s\nc%s\n" % tuple(beam.data for beam in best)
