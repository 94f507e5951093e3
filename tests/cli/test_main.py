"""The table of commands."""

import pytest

import jaxblt
from jaxblt.cli.main import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    try:
        status = main([name, "--help"])
    except SystemExit as stopped:
        status = stopped.code
    assert not status
    assert len(capsys.readouterr().out) > 200


def test_the_program_lists_its_commands(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in COMMANDS)
    assert main([]) == 2
    capsys.readouterr()
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxblt {jaxblt.__version__}\n"


def test_an_unknown_command_is_told():
    with pytest.raises(
        ValueError, match=r"unknown command 'trian' \(perhaps train\), choose one of: train, "
    ):
        main(["trian"])
