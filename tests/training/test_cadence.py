from jaxblt.training.cadence import SaveCadence


def test_a_checkpoint_is_due_every_so_many_steps_and_seconds_and_until_it_is_saved() -> None:
    now = [0.0]
    saves = SaveCadence(10, 300.0, clock=lambda: now[0])
    assert not saves.due(9)
    assert saves.due(10)
    assert saves.due(11)
    saves.saved()
    assert not saves.due(12)
    now[0] = 299.0
    assert not saves.due(13)
    now[0] = 300.0
    assert saves.due(14)
    saves.saved()
    assert not saves.due(15)
    now[0] = 1e9
    assert not SaveCadence(10, None, clock=lambda: now[0]).due(9)
